// Package rdma tests libfared-verbs with unmodified RDMA programs of Debian, and NCCL's net plugin, over rdma_rxe, on a
// kernel in a virtual machine: `make vm` runs it. Packets are counted by source port at the far end of every plane. It
// also runs programs between rdma_rxe and fared_soft0.
package rdma
