"""A web page that shows the runs of a results folder, during and after the runs."""
