"""What training costs and what compression saves: prices, runs, break-even, energy, uncertainty. No torch.

Every constant stands in `data/*.csv` with its source and date; nothing is fetched.
"""
