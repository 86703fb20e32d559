"""Where costs come from: a device's stated rates (roofline), or measurement; and the sizes behind both."""
