"""The service under load, on real processes: see __main__. machine starts them, filling stores jobs, load asks, changes
writes what running jobs write. Nothing here is imported by the product.
"""
