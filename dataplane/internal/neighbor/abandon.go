// Package neighbor removes neighbor entries for next hops that have become unreachable.
package neighbor

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Abandon makes the kernel stop address resolution on a device that has lost its carrier, and drop the packets that are
// queued for an answer. The kernel itself sends three requests, a second apart (net/core/neighbor.c). During that time
// TCP does not retransmit the data in the queued packets (skb_still_in_host_queue, net/ipv4/tcp_output.c), although its
// route already uses another device: a connection whose plane failed would stall for three seconds. Call it when no
// more packets are sent to that device.
//
// Only entries in resolution (NUD_INCOMPLETE) are deleted; entries set by an administrator stay. A device that does not
// exist has no entries.
func Abandon(h *netlink.Handle, device int) error {
	var errs []error
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		all, err := h.NeighList(device, family)
		if err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, err)
		}
		for i := range all {
			if all[i].LinkIndex != device || all[i].State != netlink.NUD_INCOMPLETE {
				continue
			}
			err := h.NeighDel(&netlink.Neigh{LinkIndex: device, Family: family, IP: all[i].IP})
			if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
				errs = append(errs, err)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cannot drop the packets that wait for a next hop on device %d: %w", device, err)
	}
	return nil
}
