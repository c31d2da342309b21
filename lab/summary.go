package lab

import "slices"

// Spread summarizes a measurement over several runs.
type Spread struct {
	// Median is the middle value; for an even count, the mean of the two in the middle, rounded down.
	Median int64 `json:"median"`
	Min    int64 `json:"min"`
	Max    int64 `json:"max"`
}

// Summary summarizes a step over several runs of its scenario.
type Summary struct {
	Scenario string `json:"scenario"`
	Step     string `json:"step"`
	// Runs is the number of times that the step was played, OK the number of these in which every expectation was met.
	Runs int `json:"runs"`
	OK   int `json:"ok"`
	// WeightsFollowed summarizes Result.WeightsFollowedNS, nanoseconds.
	WeightsFollowed Spread `json:"weights_followed_ns"`
	// LossInterval summarizes Traffic.LossIntervalNS, nanoseconds, and PacketsLost Traffic.Lost; nil if no packets are
	// sent.
	LossInterval *Spread `json:"loss_interval_ns,omitempty"`
	PacketsLost  *Spread `json:"packets_lost,omitempty"`
}

// Summarize summarizes runs of the same scenarios, each the results of its steps in order: one Summary per step. A run
// that ended early counts for the steps that it has played.
func Summarize(runs [][]Result) []Summary {
	var all []Summary
	for step := 0; ; step++ {
		var s Summary
		var followed, interval, lost []int64
		for _, run := range runs {
			if step >= len(run) {
				continue
			}
			r := run[step]
			s.Scenario, s.Step = r.Scenario, r.Step
			s.Runs++
			if r.OK {
				s.OK++
			}
			followed = append(followed, r.WeightsFollowedNS)
			if r.Traffic != nil {
				interval = append(interval, r.Traffic.LossIntervalNS)
				lost = append(lost, int64(r.Traffic.Lost))
			}
		}
		if s.Runs == 0 {
			return all
		}
		s.WeightsFollowed = *spread(followed)
		s.LossInterval, s.PacketsLost = spread(interval), spread(lost)
		all = append(all, s)
	}
}

// spread returns nil for no values.
func spread(values []int64) *Spread {
	if len(values) == 0 {
		return nil
	}
	slices.Sort(values)
	n := len(values)
	low, high := values[(n-1)/2], values[n/2]
	return &Spread{Median: low + (high-low)/2, Min: values[0], Max: values[n-1]}
}
