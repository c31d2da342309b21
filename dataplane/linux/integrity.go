package linux

import (
	"fmt"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// integrity reports whether packets follow the acknowledged state.
type integrity struct {
	state  *state
	notify func(*farev1.Integrity) // nil disables reports
	torn   string                  // the current difference from the acknowledged state; "" means none
	shadow string                  // the other program's route that packets follow; "" means none
	unread bool                    // the kernel could not be read back
}

// Guard implements contract.Guardian. report is called when acknowledged state is found missing or changed in the
// kernel, and when it is restored. Guard must be called before all other methods.
func (d *Driver) Guard(report func(*farev1.Integrity)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.integrity.notify = report
}

// differs counts a difference between the kernel and the acknowledged state, and reports the first one.
func (in *integrity) differs(format string, args ...any) {
	in.state.stats.Differences++
	if in.torn == "" {
		in.tear(fmt.Sprintf(format, args...))
	}
}

// restored counts and reports a difference that is repaired already.
func (in *integrity) restored(what string) {
	broken := in.torn != ""
	in.differs("%s", what)
	if broken { // the report comes with the end of that difference
		in.state.log.Warn("linux data plane: another program changed settings of the kernel; they are repaired", "what", what)
		return
	}
	in.mended(nil)
}

// tear reports that packets do not follow the acknowledged state.
func (in *integrity) tear(what string) {
	in.torn = what
	in.report(false, what)
}

// mended reports that packets follow the acknowledged state again, after a sync without failures.
func (in *integrity) mended(failures []failure) {
	if in.torn == "" || len(failures) > 0 || in.unread {
		return
	}
	in.state.log.Warn("linux data plane: another program changed objects of the agent; they are repaired", "what", in.torn)
	in.report(true, in.torn)
	in.torn = ""
}

// shadowed reports the other program's route that packets follow in place of the Driver's, or, with "", that there is
// none any more.
func (in *integrity) shadowed(what string) {
	before := in.shadow
	if what == before {
		return
	}
	if in.shadow = what; what != "" {
		in.state.log.Error("linux data plane: packets follow a route of another program", "what", what)
	} else {
		in.state.log.Warn("linux data plane: packets no longer follow a route of another program", "what", before)
	}
	if in.torn == "" { // else the report comes with the end of that difference
		in.report(true, before)
	}
}

// report calls notify. While packets follow another program's route, the state is not intact.
func (in *integrity) report(intact bool, message string) {
	if intact && in.shadow != "" {
		intact, message = false, in.shadow
	}
	if in.notify != nil {
		in.notify(&farev1.Integrity{Intact: intact, Message: message, Repairs: in.state.stats.Differences})
	}
}
