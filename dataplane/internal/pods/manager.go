package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/linux"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/plainfile"
)

const (
	// Limit is the greatest number of attachments.
	Limit = 512
	// watchPeriod is the period of the checks whether namespaces exist.
	watchPeriod = time.Second
	// waitLimit bounds AttachRequest.wait_ns.
	waitLimit = 30 * time.Second
	// recordName is the file of an attachment's record, mountName the directory that its pod mounts at /run/fared, with
	// the slot table at the same place as the host's.
	recordName, mountName, tableName = "attachment.json", "run", "table/slots"
)

// Guest restricts an attachment: the policy for its namespace, and a claim on it.
type Guest interface {
	contract.Policy
	// Refresh is called once a second.
	Refresh()
	Close() error
}

// Config configures a Manager.
type Config struct {
	// Directory has a directory for each attachment; it is made when it is needed.
	Directory string
	// Refusal, if set, is the status of every Attach: the driver does not serve namespaces.
	Refusal error
	// Linux configures the drivers.
	Linux linux.Config
	// Enter is called in the namespace of an attachment before its driver is opened.
	Enter func(*slog.Logger) (Guest, error)
	// Settled reports whether the host's state is complete, so that objects without a wanted state may be removed.
	Settled func() bool
	Version string
	Log     *slog.Logger
}

// Manager implements farev1.AttachServiceServer. It is safe for concurrent use. Close must follow New.
type Manager struct {
	farev1.UnimplementedAttachServiceServer

	c        Config
	server   *contract.Server // of the host
	space    netns.Namespace  // of the host
	spaceID  string
	instance string
	mirror   *mirror
	failures atomic.Uint64
	stop     chan struct{}
	working  sync.WaitGroup

	work      sync.Mutex // serializes changes of domains, locked before mu
	following bool
	closed    bool

	mu      sync.Mutex // guards everything below
	domains map[string]*domain
}

// record is the part of an attachment that a restart needs.
type record struct {
	ID        string   `json:"id"`
	Path      string   `json:"netns_path"`
	Namespace string   `json:"namespace"` // netns.ID
	Devices   []Device `json:"devices,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
}

func (r *record) equal(s *record) bool {
	return r.ID == s.ID && r.Path == s.Path && r.Namespace == s.Namespace && slices.Equal(r.Devices, s.Devices) && slices.Equal(r.Addresses, s.Addresses)
}

// New continues the attachments of an earlier run. The calling thread is in the namespace of the host.
func New(c Config, server *contract.Server) (_ *Manager, err error) {
	m := &Manager{c: c, server: server, mirror: &mirror{}, stop: make(chan struct{}), domains: map[string]*domain{}, instance: fmt.Sprintf("agent-%d", time.Now().UnixNano())}
	if m.space, err = netns.Current(); err != nil {
		return nil, err
	}
	if m.spaceID, err = netns.ID(); err != nil {
		m.space.Close()
		return nil, err
	}
	m.work.Lock()
	defer m.work.Unlock()
	for r := range records(c.Directory, c.Log) {
		if c.Refusal != nil {
			c.Log.Warn("a pod of an earlier run is detached", "pod", r.ID, "why", status.Convert(c.Refusal).Message())
			if err := release(c.Directory, r, c.Linux); err != nil {
				c.Log.Error("cannot detach a pod", "pod", r.ID, "error", err)
			}
			continue
		}
		space, err := reopen(r)
		if err != nil {
			c.Log.Info("the namespace of a pod is gone", "pod", r.ID, "why", err)
			if err := os.RemoveAll(filepath.Join(c.Directory, r.ID)); err != nil {
				c.Log.Error("cannot remove a pod's directory", "pod", r.ID, "error", err)
			}
			continue
		}
		m.begin(newDomain(m, r, space))
	}
	return m, nil
}

// begin starts a domain. The caller holds work.
func (m *Manager) begin(d *domain) {
	m.follow()
	m.mu.Lock()
	m.domains[d.id] = d
	m.mu.Unlock()
	go d.run()
}

// follow starts following the host's state, once.
func (m *Manager) follow() {
	if m.following {
		return
	}
	m.following = true
	feed := m.server.Follow(m.mirror.load)
	m.working.Go(func() {
		for {
			select {
			case <-m.stop:
				return
			case <-feed.Ready():
			}
			var now delta
			feed.Take(func(s *contract.State, changed contract.Changed) { now = read(s, changed) })
			m.mirror.update(now)
			for _, d := range m.list() {
				d.note(now.changed)
			}
		}
	})
	m.working.Go(m.watch)
}

// watch detaches namespaces that are gone, and repeats removals that have failed.
func (m *Manager) watch() {
	timer := time.NewTimer(beat.Until(time.Now(), watchPeriod))
	defer timer.Stop()
	for {
		select {
		case <-m.stop:
			return
		case <-timer.C:
		}
		timer.Reset(beat.Until(time.Now(), watchPeriod))
		for _, d := range m.list() {
			if d.gone() || d.isLeaving() {
				m.work.Lock()
				if m.find(d.id) == d && !m.closed {
					d.log.Info("the namespace of a pod is gone")
					if err := m.remove(d); err != nil {
						d.log.Warn("cannot detach a pod; retrying", "error", err)
					}
				}
				m.work.Unlock()
			}
		}
	}
}

func (d *domain) isLeaving() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leaving
}

// list returns all domains, sorted by id.
func (m *Manager) list() []*domain {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.SortedFunc(maps.Values(m.domains), func(a, b *domain) int {
		if a.id < b.id {
			return -1
		}
		return 1
	})
}

func (m *Manager) find(id string) *domain {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.domains[id]
}

// remove ends an attachment and removes all its objects. After an error the attachment stays, and watch repeats. The
// caller holds work.
func (m *Manager) remove(d *domain) error {
	d.mu.Lock()
	d.leaving = true
	d.mu.Unlock()
	d.halt()
	if err := d.clear(); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(m.c.Directory, d.id)); err != nil {
		return err
	}
	d.space.Close()
	m.mu.Lock()
	delete(m.domains, d.id)
	m.mu.Unlock()
	return nil
}

// Close ends all work. The kernel continues to forward in the namespaces, and New continues the attachments.
func (m *Manager) Close() error {
	m.work.Lock()
	defer m.work.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	close(m.stop)
	var errs []error
	for _, d := range m.list() {
		d.halt()
		errs = append(errs, d.shut())
		d.space.Close()
	}
	m.work.Unlock() // watch may wait for it
	m.working.Wait()
	m.work.Lock()
	m.space.Close()
	return errors.Join(errs...)
}

// Stats are the numbers of attachments, of those in effect, and of failed attempts to program one.
type Stats struct {
	Attached, InEffect int
	Failures           uint64
}

// Stats returns the present numbers.
func (m *Manager) Stats() Stats {
	s := Stats{Failures: m.failures.Load()}
	for _, d := range m.list() {
		s.Attached++
		if a, _ := d.attachment(); a.InEffect {
			s.InEffect++
		}
	}
	return s
}

func (m *Manager) hostForwarding() *farev1.Forwarding {
	m.mirror.mu.RLock()
	defer m.mirror.mu.RUnlock()
	return m.mirror.forwarding
}

func (m *Manager) hostPlanes() []*farev1.ForwardingPlane { return m.hostForwarding().GetPlanes() }

// slots returns the directory that the pod of an attachment mounts.
func (m *Manager) slots(id string) string { return filepath.Join(m.c.Directory, id, mountName) }

var validID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

func checkID(id string) error {
	if !validID.MatchString(id) {
		return status.Errorf(codes.InvalidArgument, "id %.140q: use 1 to 128 letters, digits, dots, underscores and hyphens, the first one a letter or a digit", id)
	}
	return nil
}

// requested returns the record that a request wants, without its namespace.
func requested(request *farev1.AttachRequest) (r record, err error) {
	if err := checkID(request.GetId()); err != nil {
		return r, err
	}
	r.ID = request.Id
	switch at := request.Namespace.(type) {
	case *farev1.AttachRequest_NetnsPath:
		if r.Path = at.NetnsPath; !filepath.IsAbs(r.Path) {
			return r, status.Errorf(codes.InvalidArgument, "netns_path %q is not an absolute path", r.Path)
		}
	case *farev1.AttachRequest_Pid:
		if at.Pid < 1 {
			return r, status.Errorf(codes.InvalidArgument, "pid %d is no process", at.Pid)
		}
		r.Path = fmt.Sprintf("/proc/%d/ns/net", at.Pid)
	default:
		return r, status.Error(codes.InvalidArgument, "the namespace is missing: set netns_path or pid")
	}
	seen, used := map[string]bool{}, map[string]bool{}
	for i, d := range request.Devices {
		switch {
		case d.GetDevice() == "" || d.Device == "lo":
			return r, status.Errorf(codes.InvalidArgument, "devices[%d]: %q cannot be a sub-port", i, d.GetDevice())
		case seen[d.Device] || d.SubPort != "" && used[d.SubPort]:
			return r, status.Errorf(codes.InvalidArgument, "devices[%d]: %s %s is listed twice", i, d.Device, d.SubPort)
		}
		seen[d.Device], used[d.SubPort] = true, true
		r.Devices = append(r.Devices, Device{d.Device, d.SubPort})
	}
	addresses, err := hostPrefixes(request.Addresses)
	if err != nil {
		return r, status.Errorf(codes.InvalidArgument, "addresses: %v", err)
	}
	for _, a := range addresses {
		r.Addresses = append(r.Addresses, a.String())
	}
	return r, nil
}

// Attach implements farev1.AttachServiceServer.
func (m *Manager) Attach(ctx context.Context, request *farev1.AttachRequest) (*farev1.AttachResponse, error) {
	r, err := requested(request)
	if err != nil {
		return nil, err
	}
	if m.c.Refusal != nil {
		return nil, m.c.Refusal
	}
	d, err := m.attach(r)
	if err != nil {
		return nil, err
	}
	timeout := time.NewTimer(time.Duration(min(request.WaitNs, uint64(waitLimit), math.MaxInt64)))
	defer timeout.Stop()
	for {
		attachment, news := d.attachment()
		if attachment.InEffect || request.WaitNs == 0 {
			return &farev1.AttachResponse{Attachment: attachment}, nil
		}
		select {
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		case <-timeout.C:
			return &farev1.AttachResponse{Attachment: attachment}, nil
		case <-d.done:
			return nil, status.Errorf(codes.Unavailable, "attachment %s ended", r.ID)
		case <-news:
		}
	}
}

// attach returns the domain of a record.
func (m *Manager) attach(r record) (*domain, error) {
	m.work.Lock()
	defer m.work.Unlock()
	if m.closed {
		return nil, status.Error(codes.Unavailable, "the agent stops")
	}
	space, err := netns.Open(r.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, status.Errorf(codes.NotFound, "%v", err)
	case err != nil:
		return nil, status.Errorf(codes.FailedPrecondition, "%v", err)
	}
	keep := false
	defer func() {
		if !keep {
			space.Close()
		}
	}()
	if r.Namespace, err = identity(space); err != nil {
		return nil, unavailable(err)
	}
	if r.Namespace == m.spaceID {
		return nil, status.Errorf(codes.FailedPrecondition, "%s is the namespace of the host, which needs no attachment", r.Path)
	}
	for _, d := range m.list() {
		other := d.recorded()
		switch {
		case d.id != r.ID && other.Namespace == r.Namespace && !d.isLeaving():
			return nil, status.Errorf(codes.AlreadyExists, "%s is attached as %q: detach that first", r.Path, d.id)
		case d.id != r.ID:
		case d.isLeaving() || other.Namespace != r.Namespace && d.gone():
			if err := m.remove(d); err != nil {
				return nil, unavailable(err)
			}
		case other.Namespace != r.Namespace:
			return nil, status.Errorf(codes.AlreadyExists, "%q is attached to %s: detach it first", r.ID, other.Path)
		}
	}
	m.follow()
	if err := m.check(r, space); err != nil {
		return nil, err
	}
	d := m.find(r.ID)
	if d == nil && len(m.list()) >= Limit {
		return nil, status.Errorf(codes.ResourceExhausted, "%d namespaces are attached, as many as an agent serves", Limit)
	}
	if d != nil {
		if before := d.recorded(); before.equal(&r) {
			return d, nil
		}
	}
	if err := write(m.c.Directory, r); err != nil {
		return nil, unavailable(err)
	}
	if d != nil {
		d.replace(r)
		return d, nil
	}
	keep = true
	d = newDomain(m, r, space)
	m.begin(d)
	return d, nil
}

// check returns an error for a record whose devices or addresses are unusable.
func (m *Manager) check(r record, space netns.Namespace) error {
	host := m.hostForwarding()
	devices, without, err := find(space, m.space, host, r.Devices)
	var missing *absentError
	var conflict *conflictError
	switch {
	case errors.As(err, &missing):
		return status.Error(codes.NotFound, err.Error())
	case errors.As(err, &conflict):
		return status.Error(codes.InvalidArgument, err.Error())
	case err != nil:
		return unavailable(err)
	case host == nil:
		return nil
	}
	n := len(r.Addresses)
	if n == 0 {
		found, err := sources(space, slices.Collect(maps.Values(devices)))
		if err != nil {
			return unavailable(err)
		}
		n = len(found)
	}
	if len(devices) == 0 || len(without) > 0 || n == 0 {
		return status.Error(codes.FailedPrecondition, lacking(without, n).Error())
	}
	return nil
}

// Detach implements farev1.AttachServiceServer.
func (m *Manager) Detach(_ context.Context, request *farev1.DetachRequest) (*farev1.DetachResponse, error) {
	if err := checkID(request.GetId()); err != nil {
		return nil, err
	}
	m.work.Lock()
	defer m.work.Unlock()
	if d := m.find(request.Id); d != nil && !m.closed {
		if err := m.remove(d); err != nil {
			return nil, unavailable(err)
		}
	}
	return &farev1.DetachResponse{}, nil
}

// ListAttachments implements farev1.AttachServiceServer.
func (m *Manager) ListAttachments(context.Context, *farev1.ListAttachmentsRequest) (*farev1.ListAttachmentsResponse, error) {
	out := &farev1.ListAttachmentsResponse{}
	for _, d := range m.list() {
		a, _ := d.attachment()
		out.Attachments = append(out.Attachments, a)
	}
	return out, nil
}

// identity returns the netns.ID of a namespace.
func identity(space netns.Namespace) (id string, err error) {
	err = space.Do(func() (err error) {
		id, err = netns.ID()
		return err
	})
	return id, err
}

// absent reports whether a path does not lead to a namespace.
func absent(space netns.Namespace, path string) bool {
	same, err := space.Is(path)
	return errors.Is(err, fs.ErrNotExist) || err == nil && !same
}

// reopen opens the namespace of a record.
func reopen(r record) (netns.Namespace, error) {
	space, err := netns.Open(r.Path)
	if err != nil {
		return space, err
	}
	id, err := identity(space)
	if err == nil && id != r.Namespace {
		err = fmt.Errorf("%s leads to another namespace", r.Path)
	}
	if err != nil {
		space.Close()
	}
	return space, err
}

// write stores a record, and makes the directories of its slot table, with a link for libraries of earlier versions.
func write(directory string, r record) error {
	at := filepath.Join(directory, r.ID)
	mount := filepath.Join(at, mountName)
	for _, path := range []string{directory, at, mount, filepath.Join(mount, filepath.Dir(tableName))} {
		if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := os.Chmod(path, 0o755); err != nil { // whatever the umask
			return err
		}
	}
	if err := os.Symlink(tableName, filepath.Join(mount, filepath.Base(tableName))); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	name := filepath.Join(at, recordName)
	f, err := plainfile.Replace(name+".new", os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}

// records yields the records in a directory, and removes directories without one.
func records(directory string, log *slog.Logger) func(func(record) bool) {
	return func(yield func(record) bool) {
		entries, err := os.ReadDir(directory)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Error("cannot read the attachments of an earlier run", "error", err)
		}
		for _, e := range entries {
			at := filepath.Join(directory, e.Name())
			var r record
			b, err := os.ReadFile(filepath.Join(at, recordName))
			if err == nil {
				err = json.Unmarshal(b, &r)
			}
			if err != nil || r.ID != e.Name() || checkID(r.ID) != nil {
				log.Warn("an attachment was not complete and is removed", "directory", at, "error", err)
				if err := os.RemoveAll(at); err != nil {
					log.Error("cannot remove a pod's directory", "directory", at, "error", err)
				}
				continue
			}
			if !yield(r) {
				return
			}
		}
	}
}

// release removes everything of a record.
func release(directory string, r record, config linux.Config) error {
	if space, err := reopen(r); err == nil {
		defer space.Close()
		if err := flush(space, config); err != nil {
			return err
		}
	}
	return os.RemoveAll(filepath.Join(directory, r.ID))
}

// Flush removes everything of all attachments in a directory, and returns their number. No Manager may use the
// directory.
func Flush(directory string, config linux.Config, log *slog.Logger) (n int, err error) {
	for r := range records(directory, log) {
		if err := release(directory, r, config); err != nil {
			return n, fmt.Errorf("detach %s: %w", r.ID, err)
		}
		n++
	}
	if err := os.Remove(directory); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return n, err
	}
	return n, nil
}
