package linux

import (
	"errors"
	"fmt"
	"slices"

	"github.com/fared/fared/internal/rtnl"
)

// rules leads packets to the Driver's tables, by policy rules.
type rules struct {
	state     *state
	kernel    *kernel
	integrity *integrity
	made      map[rtnl.Rule]bool // rules found or added by the last setUp
}

// wanted returns the rules that lead to the Driver's tables.
func (ru *rules) wanted() (all []rtnl.Rule) {
	for _, f := range families(ru.state.ipv6) {
		rule := rtnl.Rule{Family: f, Priority: ru.state.config.RulePriority, Table: ru.state.config.Table, Protocol: ru.state.config.Protocol}
		if !isMain(ru.state.config.Table) {
			all = append(all, rule)
		}
		rule.Priority--
		for _, s := range ru.state.want.order {
			if s.own == 0 {
				continue
			}
			for _, loopback := range s.loopbacks {
				if families(true)[familyOf(loopback.Addr())] == f {
					rule.Table, rule.Source = s.own, loopback
					all = append(all, rule)
				}
			}
		}
	}
	return all
}

// setUp adds the rules that lead to the Driver's tables and removes those of former source groups. Before the source
// groups are known, it records the rules in mirror.ruled.
func (ru *rules) setUp() error {
	b := ru.kernel.conn.Begin()
	wanted := ru.wanted()
	for _, f := range families(ru.state.ipv6) {
		found, err := ru.kernel.conn.Rules(f)
		if err != nil {
			return err
		}
		for _, want := range wanted {
			if want.Family == f && !slices.Contains(found, want) {
				if ru.made[want] {
					ru.integrity.differs("%v from %v is gone", want, want.Source)
				}
				b.SetRule(want)
			}
		}
		for _, rule := range found {
			if rule.Protocol != ru.state.config.Protocol || !ru.state.config.ofSource(rule.Table) || slices.Contains(wanted, rule) {
				continue
			}
			if ru.state.want.order == nil {
				ru.state.have.ruled[rule.Source] = rule.Table
			} else {
				b.DelRule(rule)
			}
		}
	}
	ru.state.stats.Rules += uint64(b.Len())
	if err := errors.Join(ru.kernel.conn.Do(b)...); err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	clear(ru.made)
	for _, rule := range wanted {
		ru.made[rule] = true
	}
	return nil
}
