// Package drainfile keeps the drains of a daemon in a file, so that they survive its end, an upgrade and a reboot.
//
// The first line of the file is "fared drains", the version of the format and the SHA-256 of the rest, which is a JSON
// array of records. A file is replaced as a whole: a process that is killed at any point leaves the old one or the new
// one.
package drainfile

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/internal/plainfile"
)

const (
	version = 1
	// maxSize bounds a file that is read, bytes: 1,024 sub-ports with the longest reasons need a third of it.
	maxSize = 1 << 20
)

// Record is a drained target.
type Record struct {
	core.DrainTarget
	// Since is the time of the request that drained the target.
	Since time.Time `json:"since"`
	// By is the caller of the last request that named a reason, or else of the first one; "" for one inside the
	// process.
	By string `json:"by,omitempty"`
	// Reason is the caller's, "" without one.
	Reason string `json:"reason,omitempty"`
}

// encode returns a file's content.
func encode(records []Record) ([]byte, error) {
	if records == nil {
		records = []Record{}
	}
	body, err := json.MarshalIndent(records, "", "  ")
	if err != nil {
		return nil, err
	}
	body = append(body, '\n')
	return append(fmt.Appendf(nil, "fared drains %d %x\n", version, sha256.Sum256(body)), body...), nil
}

// decode returns the records of a file's content, or an error that names what is wrong with it.
func decode(content []byte) ([]Record, error) {
	head, body, _ := bytes.Cut(content, []byte("\n"))
	var v int
	var sum string
	if n, _ := fmt.Sscanf(string(head), "fared drains %d %s", &v, &sum); n == 0 {
		return nil, fmt.Errorf("its first line is not that of a file of drains: %w", errDamaged)
	}
	if v != version {
		return nil, fmt.Errorf("it has version %d, and this fared reads version %d", v, version)
	}
	if got := fmt.Sprintf("%x", sha256.Sum256(body)); got != sum {
		return nil, fmt.Errorf("the checksum of its records is %s, its first line says %q: %w", got, sum, errDamaged)
	}
	var records []Record
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&records); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	for i, r := range records {
		only := core.DrainTarget{Plane: r.Plane}
		if r.Plane == "" {
			only = core.DrainTarget{Leaf: r.Leaf}
		}
		if r.Plane == "" && !r.Leaf.IsValid() {
			only = core.DrainTarget{SubPort: r.SubPort}
		}
		if r.DrainTarget != only || only == (core.DrainTarget{}) {
			return nil, fmt.Errorf("record %d does not have exactly one target: %w", i, errDamaged)
		}
	}
	return records, nil
}

var errDamaged = errors.New("the file is damaged")

// Load reads a file. Without a file there are no records. A file that cannot be read is moved to PATH.damaged-TIME
// (Unix seconds), so that nothing overwrites it, and the error names that file.
func Load(path string) ([]Record, error) {
	records, err := load(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return records, nil
	}
	aside := fmt.Sprintf("%s.damaged-%d", path, time.Now().Unix())
	for n := 2; ; n++ { // a start a second is possible
		if _, serr := os.Lstat(aside); errors.Is(serr, fs.ErrNotExist) || n > 100 {
			break
		}
		aside = fmt.Sprintf("%s.damaged-%d-%d", path, time.Now().Unix(), n)
	}
	if rerr := os.Rename(path, aside); rerr != nil {
		return nil, fmt.Errorf("%s: %w; it stays, because it cannot be moved: %w", path, err, rerr)
	}
	return nil, fmt.Errorf("%s: %w; it is now %s", path, err, aside)
}

func load(path string) ([]Record, error) {
	file, err := plainfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, maxSize+1))
	if err != nil {
		return nil, err
	}
	if len(content) > maxSize {
		return nil, fmt.Errorf("it has more than %d bytes: %w", maxSize, errDamaged)
	}
	return decode(content)
}

// Save replaces a file, and returns once it is on the disk. It makes the file's directory if that is missing.
func Save(path string, records []Record) (err error) {
	content, err := encode(records)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	temp, err := plainfile.Replace(path+".new", os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(temp.Name()))
		}
	}()
	_, err = temp.Write(content)
	if err == nil {
		err = temp.Sync()
	}
	if err = errors.Join(err, temp.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir makes a rename in a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
