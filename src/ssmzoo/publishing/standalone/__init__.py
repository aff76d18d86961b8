"""What travels with a checkpoint's own code in the place of modules that build or find kernels.

``ssmzoo.publishing.export_code`` reads these files; nothing of the zoo imports them.
"""
