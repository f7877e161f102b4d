"""``python -m tq.kernels``; see ``ahead``."""

from tq.kernels.ahead import main

main()
