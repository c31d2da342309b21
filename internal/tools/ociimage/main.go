// Command ociimage writes a container image of the static binaries in OCI layout, for several architectures, as one
// tar file, without Docker and without a registry. Equal inputs make equal bytes.
//
//	ociimage -version 0.1.0 -created 1767225600 -out fared-0.1.0-oci.tar amd64=out/amd64 arm64=out/arm64
//
// `skopeo copy oci-archive:FILE docker-daemon:fared:0.1.0`, `podman load -i FILE` or `ctr images import FILE` load it.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	version := flag.String("version", "", "version, for the label org.opencontainers.image.version and the image's name")
	created := flag.Int64("created", 0, "time of creation, in seconds since 1970")
	out := flag.String("out", "", "tar file to write")
	flag.Parse()
	if *version == "" || *out == "" || flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "ociimage: -version, -out and at least one ARCH=FOLDER are needed")
		os.Exit(2)
	}
	if err := write(*out, *version, time.Unix(*created, 0).UTC(), flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "ociimage:", err)
		os.Exit(1)
	}
}

// write writes the index of one image for each ARCH=FOLDER.
func write(out, version string, created time.Time, folders []string) error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, b := range folders {
		arch, folder, ok := strings.Cut(b, "=")
		if !ok {
			return fmt.Errorf("%q is not ARCH=FOLDER", b)
		}
		image, err := image(folder, version, arch, created)
		if err != nil {
			return fmt.Errorf("%s: %w", folder, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "linux", Architecture: arch},
		}})
	}
	dir, err := os.MkdirTemp("", "ociimage")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path, err := layout.Write(dir, mutate.IndexMediaType(empty.Index, types.OCIImageIndex))
	if err != nil {
		return err
	}
	name := map[string]string{"org.opencontainers.image.ref.name": version, "io.containerd.image.name": "fared:" + version}
	if err := path.AppendIndex(index, layout.WithAnnotations(name)); err != nil {
		return err
	}
	return archive(out, dir, created)
}

// image has the programs of a folder as its only files, and fared as its entry point.
func image(folder, version, arch string, created time.Time) (v1.Image, error) {
	layer, err := layerOf(folder, created)
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if image, err = mutate.Append(image, mutate.Addendum{Layer: layer, MediaType: types.OCILayer,
		History: v1.History{Created: v1.Time{Time: created}, CreatedBy: "fared " + version}}); err != nil {
		return nil, err
	}
	return mutate.ConfigFile(image, configOf(image, version, arch, created))
}

// configOf returns the image's configuration. Plain `docker run fared` prints the help text.
func configOf(image v1.Image, version, arch string, created time.Time) *v1.ConfigFile {
	file, err := image.ConfigFile()
	if err != nil { // the configuration is in memory
		panic(err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Created = "linux", arch, v1.Time{Time: created}
	file.Config.Entrypoint = []string{"/usr/bin/fared"}
	file.Config.Env = []string{"PATH=/usr/bin"}
	file.Config.Labels = map[string]string{
		"org.opencontainers.image.title":    "fared",
		"org.opencontainers.image.version":  version,
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
	return file
}

// layerOf returns a layer with the programs of a folder in /usr/bin, in the order of their names.
func layerOf(folder string, created time.Time) (v1.Layer, error) {
	programs, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, dir := range []string{"usr/", "usr/bin/"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, ModTime: created}); err != nil {
			return nil, err
		}
	}
	for _, program := range programs {
		data, err := os.ReadFile(filepath.Join(folder, program.Name()))
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "usr/bin/" + program.Name(), Mode: 0o755, Size: int64(len(data)), ModTime: created}); err != nil {
			return nil, err
		}
		if _, err := w.Write(data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer))
}

// archive writes the files of dir, in the order of their names, as a tar file.
func archive(out, dir string, created time.Time) (err error) {
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data)), ModTime: created}); err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	}); err != nil {
		return err
	}
	return w.Close()
}
