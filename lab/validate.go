package lab

import (
	"slices"
	"strings"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// NetnsServers is the default of Options.Servers in a fabric of namespaces. It is small, because everything runs on one
// machine.
const NetnsServers = 4

// maxCables limits the number of cables on one machine.
const maxCables = 1024

// defaultRate is the default number of packets per second that each server sends; maxRate is the maximum.
const (
	defaultRate = 2000
	maxRate     = 200_000
)

// rateOf converts the Rate option to packets per second.
func rateOf(option int) int {
	if option == 0 {
		return defaultRate
	}
	return max(option, 0)
}

// validateNetns rejects options that no fabric of namespaces supports.
func (o Options) validateNetns() error {
	n := o.Netns
	if !slices.Contains(backend.Drivers, n.Driver) {
		return backend.NewOptionError("{Driver} %q is not known: use %s", n.Driver, strings.Join(backend.Drivers, ", "))
	}
	if o.Mode == "per-packet" && n.Driver == "linux" {
		return backend.NewOptionError("{Mode} per-packet with {Driver} linux: the kernel's nexthop groups do not spray packets, use {Driver} bpf")
	}
	if f, err := topo.New(o.Spec); err == nil && len(f.Cables) > maxCables {
		return backend.NewOptionError("{Planes} %d, {Servers} %d and {SubPorts} %d: %d cables, more than the %d of a fabric of namespaces", o.Planes, o.Servers, o.SubPorts, len(f.Cables), maxCables)
	}
	return o.validateReal()
}

// validateReal rejects options that no fabric with separate processes supports.
func (o Options) validateReal() error {
	if rate := o.rate(); rate > maxRate {
		return backend.NewOptionError("{Rate} %d is not within 0 to %d", rate, maxRate)
	}
	if o.Speed < minSpeed {
		return backend.NewOptionError("{Speed} %s: below %s, a cable would be too slow for its BGP session", o.Speed, minSpeed)
	}
	return nil
}

// minSpeed leaves 1 Mbit/s after scaling.
const minSpeed fare.Bandwidth = 1e6 * backend.RateScale
