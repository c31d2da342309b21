// Package nupa tests a plane of memory that machines share: two virtual machines with Debian's kernel map one ivshmem
// device and exchange verified traffic, while processes and machines are killed. `make vm` runs it.
package nupa
