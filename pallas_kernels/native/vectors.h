// Vectors of 16 numbers, for each set of instructions in a namespace of its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#define JAXPAGED_EACH_SET "../native/vectors_of_set.h"
#include "each_set.h"
