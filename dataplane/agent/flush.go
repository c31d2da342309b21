package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fared/fared/dataplane/internal/journal"
	"github.com/fared/fared/dataplane/internal/pods"
	"github.com/fared/fared/internal/unixsocket"
)

// InUse reports whether an error of New or Flush means that another agent is running.
func InUse(err error) bool {
	var socket *unixsocket.InUseError
	var file *journal.InUseError
	var namespace *ClaimedError
	if errors.As(err, &namespace) {
		return true
	}
	return errors.As(err, &socket) || errors.As(err, &file)
}

// Flushed is the result of Flush.
type Flushed struct {
	Removed []string // a description of each removed kind of object
	// NoJournal means that objects were removed and Config.Journal did not exist: an agent with another journal would
	// restore them at its next start.
	NoJournal bool
}

// Flush removes the kernel objects of any agent with these names and marks, and the journal. It fails while an agent
// holds the network namespace, the socket or the journal, because that agent would restore everything. A journal at
// another path survives.
func Flush(c Config) (f Flushed, err error) {
	if err := c.complete(); err != nil {
		return f, err
	}
	if c.Driver != Memory {
		claim, err := takeClaim("flush")
		if err != nil {
			return f, err
		}
		defer claim.release()
	}
	if c.Socket != "" && isDirectory(filepath.Dir(c.Socket)) {
		l, err := unixsocket.Listen(unixsocket.Config{Path: c.Socket, Mode: 0o600, Setting: "path"}, c.Log)
		if err != nil {
			return f, &FieldError{"Socket", err}
		}
		defer l.Close()
	}
	if c.Pods != "" && c.Driver != Memory {
		n, err := pods.Flush(c.Pods, linuxSettings(&c), c.Log)
		if n > 0 {
			f.Removed = append(f.Removed, fmt.Sprintf("attachments: %d", n))
		}
		if err != nil {
			return f, err
		}
	}
	journaled := c.Journal == ""
	if c.Journal != "" && isDirectory(filepath.Dir(c.Journal)) {
		_, statErr := os.Stat(c.Journal)
		if err := journal.Remove(c.Journal); err != nil {
			return f, err
		}
		if err := os.Remove(c.addresses()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
		if !errors.Is(statErr, fs.ErrNotExist) {
			f.Removed, journaled = append(f.Removed, "journal "+c.Journal), true
		}
	}
	more, err := flushDrivers(&c)
	f.Removed, f.NoJournal = append(f.Removed, more...), len(more) > 0 && !journaled
	return f, err
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
