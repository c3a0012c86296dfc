"""What kvalign's claims are measured with; docs/benchmarks.md says how to run each. Not part of the package."""
