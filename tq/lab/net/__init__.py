"""Several hosts with shaped links on one machine: the hosts, the ranks that run on them, and their workloads."""
