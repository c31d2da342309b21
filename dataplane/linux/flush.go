package linux

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// Removed holds the numbers of objects that Flush removed.
type Removed struct{ Routes, Rules, Groups, Nexthops int }

// Flush removes every marked route, rule and nexthop object from the network namespace of the calling thread, in all
// tables, and nothing else. It needs no Driver, and must not run while a Driver is open. Sysctls stay.
func Flush(config Config) (removed Removed, err error) {
	config, err = config.withDefaults()
	if err != nil {
		return removed, fmt.Errorf("flush the linux data plane: %w", err)
	}
	conn, err := rtnl.Dial()
	if err != nil {
		return removed, fmt.Errorf("flush the linux data plane: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	// The kinds are processed in sequence, each read just before its removal: removing a nexthop removes the routes
	// that use it.
	for _, kind := range []func(*rtnl.Conn, uint8, *rtnl.Batch) (*int, error){removed.rules, removed.routes, removed.groups, removed.nexthops} {
		b := conn.Begin()
		count, err := kind(conn, config.Protocol, b)
		if err != nil {
			return removed, fmt.Errorf("flush the linux data plane: %w", err)
		}
		var errs []error
		for _, err := range conn.Do(b) {
			switch {
			case err == nil:
				*count++
			case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH):
				errs = append(errs, err)
			}
		}
		if err := errors.Join(errs...); err != nil {
			return removed, fmt.Errorf("flush the linux data plane: %w", err)
		}
	}
	return removed, nil
}

func (r *Removed) rules(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	for _, f := range families(hasIPv6()) {
		rules, err := conn.Rules(f)
		if err != nil {
			return nil, err
		}
		for _, rule := range rules {
			if rule.Protocol == protocol {
				b.DelRule(rule)
			}
		}
	}
	return &r.Rules, nil
}

func (r *Removed) routes(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	for _, f := range families(hasIPv6()) {
		routes, err := conn.RoutesBy(f, 0, protocol)
		if err != nil {
			return nil, err
		}
		for _, route := range routes {
			b.DelRoute(byNexthop(route))
		}
	}
	return &r.Routes, nil
}

func (r *Removed) groups(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	return &r.Groups, delNexthops(conn, protocol, b, true)
}

func (r *Removed) nexthops(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	return &r.Nexthops, delNexthops(conn, protocol, b, false)
}

func delNexthops(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch, groups bool) error {
	all, err := conn.Nexthops()
	if err != nil {
		return err
	}
	for _, n := range all {
		if n.Protocol == protocol && len(n.Members) > 0 == groups {
			b.DelNexthop(n.ID)
		}
	}
	return nil
}
