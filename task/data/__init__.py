"""Data sets as arrays, and how they are split over clients."""
