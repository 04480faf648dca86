#!/usr/bin/env bash
# Each header of llmc/ compiles alone as C11, and all of them together as C++17, without warnings.
scratch=build/test/headers
. dev/test/check.sh
make -s build/configuration_fox.h build/modeling_fox.h build/modeling_recurrent.h build/modeling_stack.h

warnings="-Wall -Wextra -Wshadow -Werror -fopenmp -D_GNU_SOURCE -fsyntax-only"
# alone HEADER...: prints the first that the compiler says of each
alone() {
    for header; do
        said=$(echo "#include \"$header\"" | cc -std=gnu11 $warnings -xc - 2>&1) ||
            echo "$header alone: $(echo "$said" | grep -m 1 'error:' || echo "$said" | tail -n 1)"
    done
}
export warnings
export -f alone
find llmc -name '*.h' | sort >"$scratch/headers.txt"
equals "" "$(xargs -n 8 -P "$(nproc)" bash -c 'alone "$@"' alone <"$scratch/headers.txt")"

# C++ warns where an initializer leaves fields out, C does not
sed 's/.*/#include "&"/' "$scratch/headers.txt" >"$scratch/all.txt"
check "all as C++17" c++ -std=gnu++17 $warnings -Wno-missing-field-initializers -I. -xc++ "$scratch/all.txt"
equals "" "$(cat "$scratch/stdout")"
report
