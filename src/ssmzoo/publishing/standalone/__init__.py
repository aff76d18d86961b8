"""Stand-ins that travel with a checkpoint's code, in place of modules that build kernels.

``ssmzoo.publishing.export_code`` reads these files; nothing of the zoo imports them.
"""
