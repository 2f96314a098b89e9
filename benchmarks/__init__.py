"""One script a table or figure; Opacus installs a package of this name, too."""
