package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/dataplane/bpf"
	"github.com/fared/fared/dataplane/linux"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/metric"
)

// openDriver opens the configured driver in the network namespace of the calling thread.
func openDriver(c *Config) (*driver, error) {
	if c.Driver == Memory {
		return memoryDriver(), nil
	}
	var cannot error
	if c.Driver == Auto {
		cannot = bpf.Supported()
	}
	kernel, settings := metricKernelSeconds.New(durations()), linuxSettings(c)
	settings.Took = func(d time.Duration) { kernel.Observe(d.Seconds()) }
	below, err := linux.Open(settings)
	if err != nil {
		return nil, err
	}
	d, err := driverAbove(c, below, cannot)
	if err == nil {
		d.kernel = kernel
	}
	return d, err
}

// linuxSettings returns the configuration of driver linux.
func linuxSettings(c *Config) linux.Config {
	settings := c.Linux
	settings.ReachPriority = cmp.Or(settings.ReachPriority, max(1, min(linux.DefaultReachPriority, cmp.Or(c.BPF.Priority, bpf.DefaultPriority)-1, cmp.Or(c.Linux.RulePriority, linux.DefaultRulePriority)-3)))
	return settings
}

// driverAbove returns the configured driver with below as its lower layer. cannot is why steering by BPF is impossible.
func driverAbove(c *Config, below *linux.Driver, cannot error) (*driver, error) {
	if c.Driver == Linux {
		return linuxDriver(c, below), nil
	}
	if cannot != nil {
		return linuxDriver(c, below, fallback(c, fmt.Sprintf("steering by BPF is not possible on this host: %v", cannot))), nil
	}
	removed, err := bpf.SweepPins(bpf.DefaultPinDir)
	if len(removed) > 0 {
		c.Log.Info("removed pins of network namespaces that are gone", "directories", strings.Join(removed, " "))
	}
	if err != nil {
		c.Log.Warn("cannot remove pins of network namespaces that are gone", "error", err)
	}
	above, err := bpf.Open(c.BPF)
	if err != nil && c.Driver == Auto {
		return linuxDriver(c, below, fallback(c, fmt.Sprintf("steering by BPF is supported on this host, but failed: %v", err))), nil
	}
	if err != nil {
		return nil, errors.Join(err, below.Close())
	}
	s := newStack(below, above, c.Log)
	below.SteeredBy(cmp.Or(c.BPF.Device, bpf.DefaultDevice))
	var private []hostcheck.Finding
	if why := above.Private(); why != "" {
		private = []hostcheck.Finding{{Reason: hostcheck.ReasonPrivate, Text: why, Remedy: "mount the BPF file system outside before the agent starts: mount -t bpf bpf /sys/fs/bpf"}}
	}
	return &driver{
		name: BPF, limitations: func() []hostcheck.Finding { return slices.Concat(private, below.Limitations()) }, forwarder: s, settle: s.Settle, healthy: s.healthy, close: s.Close,
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

// fallback returns the finding that driver auto took linux.
func fallback(c *Config, why string) hostcheck.Finding {
	flags, unit := "FARED_DATAPLANE_FLAGS of /etc/default/fared-dataplane", "fared-dataplane"
	if c.InProcess {
		flags, unit = "dataplane.flags", "fared"
	}
	return hostcheck.Finding{Reason: hostcheck.ReasonDriver,
		Text:   "driver linux: " + why + "; source ports hold for the services of slots.services, other flows follow the kernel's hash",
		Remedy: "remove the cause, or choose the driver by --driver=linux in " + flags + "; then 'systemctl restart " + unit + "'"}
}

// linuxDriver returns driver linux. always are limitations that last as long as it runs.
func linuxDriver(c *Config, below *linux.Driver, always ...hostcheck.Finding) *driver {
	return &driver{
		name: Linux, limitations: func() []hostcheck.Finding { return slices.Concat(always, below.Limitations()) }, forwarder: below, close: below.Close,
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
	for kind, n := range map[string]uint64{"nexthop": s.Nexthops, "group": s.Groups, "route": s.Routes, "rule": s.Rules} {
		sample(metricKernelOperations, float64(n), kind)
	}
	for kind, n := range map[string]int{"nexthop": s.NexthopObjects, "group": s.GroupObjects, "route": s.RouteObjects} {
		sample(metricKernelObjects, float64(n), kind)
	}
	for m, n := range map[*metric.Metric]uint64{
		metricKernelErrors: s.Errors, metricKernelRetries: s.Retries, metricKernelMoved: s.MovedByKernel, metricKernelAudits: s.Audits,
		metricKernelDifferences: s.Differences, metricKernelOverruns: s.Overruns, metricKernelResyncs: s.Resyncs, metricKernelHashMismatches: s.HashMismatches,
	} {
		sample(m, float64(n))
	}
	sample(metricKernelBrokenSubPorts, float64(s.Broken))
}

func collectBPF(sample sampler, s bpf.Stats) {
	for kind, n := range map[string]int{"group": s.Groups, "destination": s.Destinations, "pair": s.Pairs, "port_table": s.Tables} {
		sample(metricSteeringObjects, float64(n), kind)
	}
	sample(metricSteeringUncountedPairs, float64(s.Uncounted))
	sample(metricSteeringLiveSubPorts, float64(len(s.Live)))
	sample(metricSteeringAudits, float64(s.Audits))
	sample(metricSteeringRepairs, float64(s.Repairs))
	for reason, n := range s.Drops {
		sample(metricSteeringDroppedPackets, float64(n), reason.String())
	}
	for _, c := range s.Sent {
		sample(metricSteeringSentPackets, float64(c.Packets), c.Plane, c.Device)
		sample(metricSteeringSentBytes, float64(c.Bytes), c.Plane, c.Device)
	}
}
