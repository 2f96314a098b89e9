"""One script per table or figure. Opacus also installs a package of this name."""
