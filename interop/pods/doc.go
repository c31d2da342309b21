// Package pods tests pods that get their planes by the plugins of container runtimes: libcni, the runtime side of NRI,
// and containerd call them, other plugins put devices into real namespaces, a real agent programs these, and leaves
// count the packets.
package pods
