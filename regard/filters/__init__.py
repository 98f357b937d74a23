"""Classical image filters, relatives of attention: most make each pixel a weighted mean of other pixels.

    from regard.filters.nonlocal_means import nonlocal_means
    clean = nonlocal_means(image, sigma=20)

There is one module per filter; `image_arrays` says what an image may be (NumPy, torch or Pillow).
"""
