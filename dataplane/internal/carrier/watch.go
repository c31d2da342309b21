// Package carrier watches the links of a data plane's sub-ports. It uses the kernel's link events and, because the
// kernel may delay events, also requests the carrier of every sub-port (internal/linkpoll): often after a link event of
// any network namespace, rarely otherwise.
package carrier

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/linkpoll"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/rtnl"
)

// Watch watches links. Start may be called by any goroutine, Wait by one, and Poll and Ask by one at a time.
type Watch struct {
	events    *rtnl.Watch
	asks      *rtnl.Conn
	announced string
	counters  *counters
	read      time.Time // start of the last complete request

	mu       sync.Mutex // guards schedule, and orders its changes with those of the deadline
	schedule linkpoll.Schedule
}

// class returns the directory of sysfs with the devices of the calling thread's network namespace; "" if it has others,
// among which a device may have the same name and index.
func class() string {
	own, err := netns.Current()
	if err != nil {
		return ""
	}
	defer own.Close()
	if same, err := own.Is(""); err != nil || !same {
		return ""
	}
	return "/sys/class/net"
}

// Open opens a Watch in the network namespace of the calling thread. buffer is the one of rtnl.WatchLinks.
func Open(buffer int) (*Watch, error) {
	events, err := rtnl.WatchLinksEverywhere(buffer)
	if err != nil {
		return nil, err
	}
	asks, err := rtnl.Dial()
	if err != nil {
		return nil, errors.Join(err, events.Close())
	}
	w := &Watch{events: events, asks: asks, announced: announced(), counters: newCounters(class())}
	if events.Everywhere() {
		w.schedule.Listen()
	}
	w.Start()
	return w, nil
}

// Announced identifies the network namespace of the Watch (netns.ID) if Ask makes the kernel announce the changes that
// it finds to all programs there. It is empty before Linux 6.8, where only the answer to a request is prompt.
func (w *Watch) Announced() string { return w.announced }

func announced() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil || !syncs(unix.ByteSliceToString(u.Release[:])) {
		return ""
	}
	id, err := netns.ID()
	if err != nil {
		return "" // others request carriers themselves
	}
	return id
}

// syncs reports whether a kernel of this release handles a device's pending event before it answers a request for the
// device (linkwatch_sync_dev in rtnl_getlink).
func syncs(release string) bool {
	var major, minor int
	_, err := fmt.Sscanf(release, "%d.%d", &major, &minor)
	return err == nil && (major > 6 || major == 6 && minor >= 8)
}

// Close ends Wait.
func (w *Watch) Close() error { return w.events.Close() }

// Release closes what Ask uses. No call of Poll or Ask may follow.
func (w *Watch) Release() error {
	w.counters.close()
	return w.asks.Close()
}

// Filter is rtnl.Watch.Filter.
func (w *Watch) Filter(program int) error { return w.events.Filter(program) }

// Start makes Ask due now, and frequently for linkpoll.Window unless the carriers are covered: a sub-port has failed,
// and other sub-ports may fail with it.
func (w *Watch) Start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	w.schedule.Start(now)
	_ = w.events.SetDeadline(now) // fails after Close only
}

// courtesy is the delay of StartAfterChange: the next changes of the control plane arrive within it.
const courtesy = time.Millisecond

// StartAfterChange is Start after the control plane has set a sub-port down. Ask waits for a moment, because the
// weights that belong to the failure follow, and would wait for the answers.
func (w *Watch) StartAfterChange() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.schedule.StartLater(time.Now(), courtesy)
	_ = w.events.SetDeadline(w.schedule.Next()) // fails after Close only
}

// Cover sets whether another mechanism reports carriers, so that Ask is rarely due (linkpoll.Schedule.Cover): the
// caller calls Start after each change of a sub-port's carrier, or the kernel announces each without delay, because
// another Watch asks for it (Announced).
func (w *Watch) Cover(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := time.Now(); w.schedule.Cover(on, now) {
		_ = w.events.SetDeadline(now) // fails after Close only
	}
}

// Wait returns when there may be events for Poll, or Ask is due. After Close it returns os.ErrClosed.
func (w *Watch) Wait() error {
	w.mu.Lock()
	_ = w.events.SetDeadline(w.schedule.Next())
	w.mu.Unlock()
	return w.events.Wait()
}

// Poll returns the pending events like rtnl.Watch.Poll. Each event, also in another network namespace, makes Ask due
// unless the carriers are covered.
func (w *Watch) Poll() ([]rtnl.LinkEvent, error) {
	signs := w.events.Signs()
	events, err := w.events.Poll()
	if err != nil {
		w.Start()
	} else if len(events) > 0 || signs {
		w.mu.Lock()
		w.schedule.Event(time.Now()) // Wait sets the deadline
		w.mu.Unlock()
	}
	return events, err
}

// askTries limits the repetitions of requests in Ask when events arrive meanwhile; Ask is due again soon.
const askTries = 3

// trust is the time for which the kernel's counts alone show that nothing has changed. It bounds the delay should a
// count be that of a device with the same name, index and count in another network namespace.
const trust = time.Second

// Ask checks the carriers of links, whose last known states are given, if that is due. Unless the kernel's counts show
// that none has changed, it requests the links, and the kernel then announces their changes (Announced). It returns the
// events that arrived meanwhile and, once a request completes without an event, the answers, because an event that
// arrives during a request may be older or newer than the answer. Errors are those of rtnl.Watch.Poll and
// rtnl.Conn.LinksByIndex.
func (w *Watch) Ask(known []rtnl.Link) (events []rtnl.LinkEvent, err error) {
	start := time.Now()
	w.mu.Lock()
	due := w.schedule.Due(start)
	w.mu.Unlock()
	if !due {
		return nil, nil
	}
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.schedule.Done(start, time.Now())
	}()
	if start.Sub(w.read) < trust && w.counters.equal(known) {
		return nil, nil
	}
	indexes := make([]int, len(known))
	for i, l := range known {
		indexes[i] = l.Index
	}
	for range askTries {
		links, err := w.asks.LinksByIndex(indexes)
		if err != nil {
			return nil, err
		}
		news, err := w.Poll()
		if err != nil {
			return nil, err
		}
		events = append(events, news...)
		if len(news) == 0 {
			for _, l := range links {
				events = append(events, rtnl.LinkEvent{Link: l, Asked: true})
			}
			w.read = start
			break
		}
	}
	return events, nil
}
