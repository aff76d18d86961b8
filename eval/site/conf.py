"""What Sphinx is told of the site; ``build.py`` runs it."""

import ssmzoo

project = "ssmzoo"
author = "the ssmzoo authors"
project_copyright = f"2026 {author}"
version = release = ssmzoo.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
highlight_language = "none"  # equations stand in indented blocks
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes are described by a class alone, not once more as members

html_theme = "furo"
html_title = f"ssmzoo {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
