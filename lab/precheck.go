package lab

import (
	"github.com/fared/fared/topo"

	"github.com/fared/fared/lab/judge"
)

// Resolve returns the description of a lab's fabric with the defaults of that kind of lab.
func Resolve(o Options) (topo.Spec, error) {
	p, _, err := newPlan(o)
	if err != nil {
		return topo.Spec{}, err
	}
	return p.Spec, nil
}

// Check returns an error if a scenario names objects that a fabric of this size does not have, without starting one.
// The error has a line for each.
func Check(o Options, s *Scenario) error {
	p, o, err := newPlan(o)
	if err != nil {
		return err
	}
	return (&Fabric{Model: judge.NewModel(p.Fabric), options: o}).Check(s)
}
