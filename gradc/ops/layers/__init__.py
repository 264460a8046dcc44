"""Layers of networks: normalisations, poolings, recurrent layers."""
