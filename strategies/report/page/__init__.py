"""A page over a results folder: served while runs go on, and written at their end."""
