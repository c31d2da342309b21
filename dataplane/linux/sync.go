package linux

import "time"

// failure is a refused op.
type failure struct {
	op  op
	err error
}

// tries is the number of attempts of a plan; each retry is planned from the state read back from the kernel.
const tries = 3

// passes bounds the rounds of one sync while links keep changing; the remaining work waits for the next link event.
const passes = 16

// retryDelay is the pause before the next sync after the last refused attempt.
const retryDelay = time.Second

// sync brings the kernel in line with the desired state, wherever the two may differ, and returns the ops that the
// kernel refused in the last round. The caller holds mu.
func (d *Driver) sync() []failure {
	var failures []failure
	news := false // links have changed since the plan was made
	d.pollLinks()
	for try, pass := 0, 0; try < tries && pass < passes; pass++ {
		again := len(failures) > 0 && !news
		if len(failures) > 0 {
			d.state.stats.Retries++
		}
		if again {
			if err := d.reader.reread(false); err != nil {
				d.state.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
			}
		}
		pl := d.state.plan()
		if pl.empty() {
			failures = nil
			break
		}
		generation := d.links.changes
		failures = d.kernel.execute(pl, again)
		d.pollLinks()
		if news = d.links.changes != generation; len(failures) > 0 && !news { // link changes explain a refusal
			try++
		}
	}
	if len(failures) == 0 {
		d.complaint = ""
	}
	at := d.state.await(failures)
	if !at.IsZero() {
		d.repair.Reset(time.Until(at))
	}
	d.links.abandon()
	d.integrity.mended(failures)
	return failures
}

// refusal describes a failure for the caller of the operation.
func (f failure) refusal() error {
	if f.occupies() {
		return refusalOf(f.op.at)
	}
	return kernelStatus(f.err)
}
