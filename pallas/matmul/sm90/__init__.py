"""Matmul on Hopper: wgmma, TMA, warp specialisation, persistent CTAs."""
