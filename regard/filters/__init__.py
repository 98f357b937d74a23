"""Attention's ancestors: filters that make each pixel a weighted mean of others, and their kin.

    from regard.filters.nonlocal_means import nonlocal_means
    clean = nonlocal_means(picture, sigma=20)

`images` is the way in and out, and says what a picture may be; one file a filter.
"""
