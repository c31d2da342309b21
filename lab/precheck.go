package lab

// Check refuses a scenario that names what a fabric of this size does not have, without starting one. The error has a
// line for each.
func Check(o Options, s *Scenario) error {
	f := Fabric{model: newModel(&plan{Options: o.withDefaults()})}
	return f.Check(s)
}
