"""The parts of gpu_check.py: each module has ``run(check)``, which records cases."""
