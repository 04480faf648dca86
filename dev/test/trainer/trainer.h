// train_fox.c without its main, for tests; each uses only some of its functions.
#define TESTING
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../../train_fox.c"
