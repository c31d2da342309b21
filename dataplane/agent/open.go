package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/fared/fared/dataplane/bpf"
	"github.com/fared/fared/dataplane/linux"
)

// openDriver opens the configured driver in the network namespace of the calling thread.
func openDriver(c *Config) (*driver, error) {
	if c.Driver == Memory {
		return memoryDriver(), nil
	}
	steer := c.Driver != Linux
	if c.Driver == Auto {
		if err := bpf.Supported(); err != nil {
			c.Log.Warn("driver linux: steering by BPF is not possible on this host", "why", err)
			steer = false
		}
	}
	below, err := linux.Open(c.Linux)
	if err != nil {
		return nil, err
	}
	if !steer {
		return linuxDriver(c, below), nil
	}
	above, err := bpf.Open(c.BPF)
	if err != nil && c.Driver == Auto {
		c.Log.Error("driver linux: steering by BPF is supported on this host, but failed", "error", err)
		return linuxDriver(c, below), nil
	}
	if err != nil {
		return nil, errors.Join(err, below.Close())
	}
	s := &stack{below: below, above: above, log: c.Log}
	return &driver{
		name: BPF, note: above.Private(), forwarder: s, settle: s.Settle, healthy: s.healthy, close: s.Close,
		collect: func(sample sampler) {
			collectLinux(sample, below.Stats())
			stats, err := above.Stats()
			if err != nil {
				c.Log.Warn("cannot read the steering's counters", "error", err)
				return
			}
			collectBPF(sample, stats)
		},
	}, nil
}

func linuxDriver(c *Config, below *linux.Driver) *driver {
	return &driver{
		name: Linux, forwarder: below, close: below.Close,
		settle: func() error {
			if err := below.Settle(); err != nil {
				return err
			}
			// Steering left by an earlier run with the other driver would continue with outdated state.
			if steering := leftSteering(&c.BPF); steering != "" {
				c.Log.Info("removing the steering of an earlier run", "steering", steering)
				return bpf.Flush(c.BPF)
			}
			return nil
		},
		healthy: func() error { return nil },
		collect: func(sample sampler) { collectLinux(sample, below.Stats()) },
	}
}

// leftSteering describes existing objects of steering by BPF, "" if there are none.
func leftSteering(c *bpf.Config) string {
	device, pins := cmp.Or(c.Device, bpf.DefaultDevice), c.PinDir
	if _, err := net.InterfaceByName(device); err == nil {
		return fmt.Sprintf("device %s, program and maps in %s", device, pins)
	}
	if _, err := os.Stat(pins); err == nil {
		return "maps in " + pins
	}
	return ""
}

// flushDrivers removes the objects of all drivers: steering first, so that its packets take the remaining routes.
func flushDrivers(c *Config) (removed []string, err error) {
	if c.Driver == Memory {
		return nil, nil
	}
	if steering := leftSteering(&c.BPF); steering != "" {
		if err := bpf.Flush(c.BPF); err != nil {
			return nil, err
		}
		removed = append(removed, "steering: "+steering)
	}
	gone, err := linux.Flush(c.Linux)
	for _, kind := range []struct {
		n    int
		what string
	}{{gone.Rules, "rules"}, {gone.Routes, "routes"}, {gone.Groups, "nexthop groups"}, {gone.Nexthops, "nexthops"}} {
		if kind.n > 0 {
			removed = append(removed, fmt.Sprintf("%s: %d", kind.what, kind.n))
		}
	}
	return removed, err
}

func collectLinux(sample sampler, s linux.Stats) {
	const operations = "Changes sent to the kernel, by kind of object."
	for kind, n := range map[string]uint64{"nexthop": s.Nexthops, "group": s.Groups, "route": s.Routes, "rule": s.Rules} {
		sample("fared_agent_kernel_operations_total", operations, counter, float64(n), "object", kind)
	}
	const objects = "The agent's objects in the kernel."
	for kind, n := range map[string]int{"nexthop": s.NexthopObjects, "group": s.GroupObjects, "route": s.RouteObjects} {
		sample("fared_agent_kernel_objects", objects, gauge, float64(n), "object", kind)
	}
	for _, c := range []struct {
		name, help string
		n          uint64
	}{
		{"fared_agent_kernel_errors_total", "Changes that the kernel refused.", s.Errors},
		{"fared_agent_kernel_retries_total", "Batches planned again after a refusal.", s.Retries},
		{"fared_agent_kernel_moved_total", "Groups that lost members with a carrier. The agent redistributes their flows at once, by the remaining weights.", s.MovedByKernel},
		{"fared_agent_kernel_audits_total", "Comparisons of all objects with the kernel.", s.Audits},
		{"fared_agent_kernel_differences_total", "Repaired objects that other programs had changed.", s.Differences},
		{"fared_agent_kernel_overruns_total", "Times the kernel dropped link events.", s.Overruns},
		{"fared_agent_kernel_resyncs_total", "Times all objects were read again.", s.Resyncs},
		{"fared_agent_kernel_hash_mismatches_total", "Source ports that the kernel placed elsewhere than computed.", s.HashMismatches},
	} {
		sample(c.name, c.help, counter, float64(c.n))
	}
	sample("fared_agent_kernel_broken_sub_ports", "Sub-ports with a carrier whose next hop the kernel refuses.", gauge, float64(s.Broken))
}

func collectBPF(sample sampler, s bpf.Stats) {
	const objects = "Entries of the steering's maps."
	for kind, n := range map[string]int{"group": s.Groups, "destination": s.Destinations, "pair": s.Pairs, "port_table": s.Tables} {
		sample("fared_agent_steering_objects", objects, gauge, float64(n), "object", kind)
	}
	sample("fared_agent_steering_uncounted_pairs", "Pairs whose slots are not counted, because the map is full.", gauge, float64(s.Uncounted))
	sample("fared_agent_steering_live_sub_ports", "Sub-ports that may carry packets now.", gauge, float64(len(s.Live)))
	sample("fared_agent_steering_audits_total", "Comparisons of all maps, rules and routes with the kernel.", counter, float64(s.Audits))
	sample("fared_agent_steering_repairs_total", "Repaired objects of the steering that other programs had changed.", counter, float64(s.Repairs))
	for reason, n := range s.Drops {
		sample("fared_agent_steering_dropped_packets_total", "Packets that were not sent, by reason.", counter, float64(n), "reason", reason.String())
	}
}
