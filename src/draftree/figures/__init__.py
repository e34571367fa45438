"""Figures of speculative decoding: measured data beside closed forms, each as SVG, PNG and CSV."""
