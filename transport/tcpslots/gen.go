package tcpslots

// The objects and their Go code are committed for hosts without clang; TestObjectsAreFresh compares them with the
// source.
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -type address -type pair -type ports -type range -type bin -type deal -type claim connect connect.bpf.c -- -O2 -g -Wall -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
