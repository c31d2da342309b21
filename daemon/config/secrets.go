package config

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/tlsfiles"
)

// maxSecret is the kernel's TCP_MD5SIG_MAXKEYLEN and TCP_AO_MAXKEYLEN, in bytes.
const maxSecret = 80

// Length of a key of proofs, in bytes.
const shortestProofKey, longestProofKey = 16, 64

const (
	// credentialPrefix begins a value that names a credential of the systemd unit (systemd.exec(5), LoadCredential=).
	credentialPrefix = "credential:"
	// credentialsVariable is the environment variable in which systemd passes the directory of the unit's credentials.
	credentialsVariable = "CREDENTIALS_DIRECTORY"
)

// secretFiles resolves and opens the files that a configuration names.
type secretFiles struct {
	p *problems
	// dir is the configuration file's directory, the base of relative names.
	dir string
	// credentials is the directory of the unit's credentials, "" outside of a systemd unit.
	credentials string
	// unread lists the credentials that were skipped because credentials is "", sorted by position; nil makes them
	// errors.
	unread *[]string
}

// readSecrets reads the password, TCP-AO and BFD key files and checks the TLS files and the recording that a valid
// configuration names. file is the configuration file; relative names become relative to its directory, names of
// credentials become paths. Outside of a systemd unit, credentials are appended to unread, or are errors if it is nil.
func readSecrets(c *Config, p *problems, file string, unread *[]string) {
	names := &secretFiles{p: p, dir: filepath.Dir(file), unread: unread}
	if dir := os.Getenv(credentialsVariable); filepath.IsAbs(dir) {
		names.credentials = filepath.Clean(dir)
	}
	names.readBFDKeys(c.BFD.Auth, "bfd.auth")
	for i := range c.Proof.Keys {
		k, at := &c.Proof.Keys[i], item("proof.keys", i)+".key_file"
		if names.resolve(at, &k.KeyFile) {
			if k.Key = names.readSecret(at, k.KeyFile, "key", "proof", longestProofKey); k.Key != "" && len(k.Key) < shortestProofKey {
				p.add(at, fmt.Sprintf("%s holds less than %d bytes", k.KeyFile, shortestProofKey), "use a longer key, such as one of 'openssl rand -hex 16'")
			}
		}
	}
	for i := range c.Planes {
		for j := range c.Planes[i].SubPorts {
			sp := &c.Planes[i].SubPorts[j]
			for k := range sp.Sessions {
				s, path := &sp.Sessions[k], fmt.Sprintf("planes[%d].sub_ports[%d].sessions[%d]", i, j, k)
				if s.PasswordFile != "" && names.resolve(path+".password_file", &s.PasswordFile) {
					s.Password = names.readSecret(path+".password_file", s.PasswordFile, "password", "TCP MD5", maxSecret)
				}
				if ao := s.TCPAO; ao != nil && names.resolve(path+".tcp_ao.key_file", &ao.KeyFile) {
					ao.Key = names.readSecret(path+".tcp_ao.key_file", ao.KeyFile, "key", "TCP-AO", maxSecret)
				}
				names.readBFDKeys(s.BFDAuth, path+".bfd_auth")
			}
		}
	}
	type section struct {
		path          string
		cert, key, ca *string
	}
	var sections []section
	if t := c.Dataplane.TLS; t != nil {
		sections = append(sections, section{"dataplane.tls", &t.CertFile, &t.KeyFile, &t.ClientCAFile})
	}
	if t := c.API.TLS; t != nil {
		sections = append(sections, section{"api.tls", &t.CertFile, &t.KeyFile, &t.ClientCAFile})
	}
	for _, t := range sections {
		path, readable := t.path, true
		for _, f := range []struct {
			key    string
			name   *string
			secret bool
		}{{"cert_file", t.cert, false}, {"key_file", t.key, true}, {"client_ca_file", t.ca, false}} {
			if !names.resolve(join(path, f.key), f.name) {
				readable = false
				continue
			}
			file := names.open(join(path, f.key), *f.name, f.secret)
			if file == nil {
				readable = false
				continue
			}
			file.Close()
		}
		if !readable {
			continue
		}
		if _, err := tls.LoadX509KeyPair(*t.cert, *t.key); err != nil {
			p.add(path+".cert_file", fmt.Sprintf("certificate %s with key %s: %v", *t.cert, *t.key, err), "name a PEM certificate and the PEM key that belongs to it")
		} else if _, err := tlsfiles.Client(*t.cert, *t.key, *t.ca); err != nil {
			p.add(path+".client_ca_file", err.Error(), "name a file of PEM certificates")
		}
	}
	if c.Record.File != "" {
		checkWritable(p, "record.file", c.Record.File)
	}
}

// checkWritable reports an error if a file cannot be written, or cannot be created and renamed in its directory. It
// changes nothing.
func checkWritable(p *problems, path, name string) {
	dir := filepath.Dir(name)
	if info, err := os.Stat(dir); err != nil {
		p.add(path, fmt.Sprintf("directory %s: %v", dir, cause(err)), "create it or correct the name")
		return
	} else if !info.IsDir() {
		p.add(path, dir+" is not a directory", "correct the name")
		return
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		p.add(path, fmt.Sprintf("directory %s: %v", dir, err), "give fared's user the right to create files in it")
		return
	}
	info, err := os.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		p.add(path, fmt.Sprintf("%s: %v", name, cause(err)), "correct the name")
	case !info.Mode().IsRegular():
		p.add(path, name+" is not a regular file", "name a file; fared renames it to "+filepath.Base(name)+".1 when it starts")
	}
}

// cause returns a file system error without the operation and name.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// resolve makes the name of a file absolute, in place: relative to the configuration file, or the path of a credential.
// It reports whether the file is to be read.
func (f *secretFiles) resolve(path string, name *string) bool {
	credential, is := strings.CutPrefix(*name, credentialPrefix)
	switch {
	case !is && filepath.IsAbs(*name):
		*name = filepath.Clean(*name)
	case !is:
		*name = filepath.Join(f.dir, *name)
	case credential == "" || credential == "." || credential == ".." || strings.ContainsAny(credential, "/:"):
		f.p.add(path, fmt.Sprintf("%q is not the name of a credential", credential), "write the name that LoadCredential= has before its colon, such as credential:leaf0.md5")
		return false
	case f.credentials != "":
		*name = filepath.Join(f.credentials, credential)
	case f.unread != nil:
		*f.unread = append(*f.unread, credential)
		return false
	default:
		f.p.add(path, "credential "+credential+" cannot be read: this process is not part of a systemd unit ($"+credentialsVariable+" is not set)",
			"start fared by its unit, with LoadCredential="+credential+":FILE, or name a file")
		return false
	}
	return true
}

// isCredential reports whether a file is a credential of the unit. systemd grants access to a credential either by its
// owner, mode 0400, or, if the file system has ACLs, by an ACL that adds the unit's user to a file of root: the group
// bits of the mode then show the ACL's mask, 0440 (acl(5)).
func (f *secretFiles) isCredential(name string) bool {
	return f.credentials != "" && filepath.Dir(name) == f.credentials
}

// open opens a regular file; a secret file must be readable only by fared's user. On an error it reports it and returns
// nil.
func (f *secretFiles) open(path, name string, secret bool) *os.File {
	info, err := os.Stat(name) // before opening, because opening a FIFO blocks
	if err == nil && !info.Mode().IsRegular() {
		f.p.add(path, name+" is not a regular file", "name a file")
		return nil
	}
	var file *os.File
	if err == nil {
		file, err = os.Open(name)
	}
	if err == nil {
		if info, err = file.Stat(); err != nil {
			file.Close()
		}
	}
	forbidden := fs.FileMode(0o077)
	if f.isCredential(name) {
		forbidden = 0o037
	}
	switch {
	case errors.Is(err, fs.ErrNotExist) && f.isCredential(name):
		f.p.add(path, "the unit has no credential "+filepath.Base(name), "add LoadCredential="+filepath.Base(name)+":FILE to it (systemctl edit fared), and restart it")
	case errors.Is(err, fs.ErrNotExist):
		f.p.add(path, name+" does not exist", "create it or correct the name")
	case errors.Is(err, fs.ErrPermission) && secret:
		f.secretMode(path, name, "that user cannot read it")
	case errors.Is(err, fs.ErrPermission):
		f.p.add(path, name+" is not readable", "give fared's user the right to read it")
	case err != nil:
		f.p.add(path, err.Error(), "make the file readable")
	case secret && info.Mode().Perm()&forbidden != 0:
		file.Close()
		f.secretMode(path, name, fmt.Sprintf("others can too (mode %04o)", info.Mode().Perm()))
	default:
		return file
	}
	return nil
}

// secretMode reports a secret file with the wrong permissions.
func (f *secretFiles) secretMode(path, name, why string) {
	f.p.add(path, name+" must be readable by fared's user and by no other user, but "+why,
		"give it mode 0600 and fared's user as the owner; for the systemd unit, load it by LoadCredential= and write "+credentialPrefix+"NAME")
}

// readBFDKeys reads the keys of an authentication, which may be nil.
func (f *secretFiles) readBFDKeys(a *BFDAuth, path string) {
	if a == nil {
		return
	}
	longest, hash := a.longestKey()
	for i := range a.Keys {
		k, at := &a.Keys[i], item(path+".keys", i)+".key_file"
		if f.resolve(at, &k.KeyFile) {
			k.Key = f.readSecret(at, k.KeyFile, "key", "BFD with "+hash, longest)
		}
	}
}

// readSecret reads the password or key (noun) of a method that signs segments or packets: one line of at most longest
// bytes.
func (f *secretFiles) readSecret(path, name, noun, method string, longest int) string {
	file, p := f.open(path, name, true), f.p
	if file == nil {
		return ""
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, int64(longest)+3))
	if err != nil {
		p.add(path, err.Error(), "make the file readable")
		return ""
	}
	data = bytes.TrimSuffix(bytes.TrimSuffix(data, []byte("\n")), []byte("\r"))
	switch {
	case len(data) == 0:
		p.add(path, name+" is empty", "write the "+noun+" into it")
	case len(data) > longest:
		p.add(path, fmt.Sprintf("%s holds more than %d bytes", name, longest), "use a shorter "+noun+", within the limit of "+method)
	case bytes.ContainsAny(data, "\r\n\x00"):
		p.add(path, name+" holds more than one line", "write the "+noun+" alone into it")
	}
	return string(data)
}
