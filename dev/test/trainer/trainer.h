// train_fox.c without main, for tests. A test calls only some of its functions: unused ones are no warning.
#pragma once

#define TESTING
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../../train_fox.c"
