"""Measure how fast bytes move between NVMe, host memory and the device."""
