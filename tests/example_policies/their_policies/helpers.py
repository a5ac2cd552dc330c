import numba


@numba.njit
def calls_at(instance):
    return instance.running + instance.waiting
