package bpf

// The objects and their Go code are committed for hosts without clang; TestObjectsAreFresh compares them.
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -type settings -type source -type live -type place -type plane -type group -type run -type target -type destination -type address -type pair -type pins -type table -type slot_counter -type counter -type device -type device_places steer steer.bpf.c -- -O2 -g -Wall -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
