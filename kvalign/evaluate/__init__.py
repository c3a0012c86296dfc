"""What an encoded cache costs in quality: protocols, measures, baselines."""
