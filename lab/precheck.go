package lab

// Check refuses a scenario that names what a fabric of this size does not have, without starting one. The error has a
// line for each.
func Check(o Options, s *Scenario) error {
	p, err := newPlan(o)
	if err != nil {
		return err
	}
	return (&Fabric{model: newModel(p)}).Check(s)
}
