"""Whether it is right: gradients against numbers, graphs against exact algebra, and data to try them on."""
