"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""
