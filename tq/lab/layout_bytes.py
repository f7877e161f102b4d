"""placeholder"""
def sent(job, sequences): return {}
def held(job): return {}
