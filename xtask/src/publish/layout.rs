//! Folders in the OCI image layout, from which crane pushes: one image, or an index of one for each platform.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use oci_spec::image::{
    Arch, ImageIndex, ImageIndexBuilder, MediaType, OciLayoutBuilder, Os, PlatformBuilder, SCHEMA_VERSION,
};

use crate::{
    images::{blob_path, descriptor, digest, json},
    platform::Platform,
};

/// A folder, which is removed at the end.
pub struct Layout(PathBuf);

impl Drop for Layout {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Layout {
    /// Makes a layout without an image.
    pub fn empty(folder: PathBuf) -> Result<Self> {
        let blobs = folder.join("blobs/sha256");
        fs::create_dir_all(&blobs).with_context(|| format!("making {}", blobs.display()))?;
        let layout = Self(folder);
        let version = OciLayoutBuilder::default()
            .image_layout_version("1.0.0")
            .build()?;
        layout.file("oci-layout", &json(&version)?)?;
        Ok(layout)
    }

    /// Makes a layout of the archives of one image, each of a platform. Several become an index.
    pub fn of(archives: &[(Platform, PathBuf)], folder: PathBuf) -> Result<Self> {
        let layout = Self::empty(folder)?;
        let mut manifests = Vec::new();
        for (platform, archive) in archives {
            let file = fs::File::open(archive).with_context(|| format!("opening {}", archive.display()))?;
            // An archive's index takes the place of the one before. Blobs have names of their own.
            tar::Archive::new(file)
                .unpack(&layout.0)
                .with_context(|| format!("unpacking {}", archive.display()))?;
            let index = ImageIndex::from_file(layout.0.join("index.json"))
                .with_context(|| format!("reading the index of {}", archive.display()))?;
            let mut manifest = index
                .manifests()
                .first()
                .with_context(|| format!("no image in {}", archive.display()))?
                .clone();
            let made_for = PlatformBuilder::default()
                .architecture(Arch::from(platform.architecture()))
                .os(Os::Linux)
                .build()?;
            manifest.set_annotations(None);
            manifest.set_platform(Some(made_for));
            manifests.push(manifest);
        }
        if manifests.len() > 1 {
            let index = ImageIndexBuilder::default()
                .schema_version(SCHEMA_VERSION)
                .media_type(MediaType::ImageIndex)
                .manifests(manifests)
                .build()?;
            layout.set_root(MediaType::ImageIndex, &json(&index)?)?;
        }
        Ok(layout)
    }

    /// Names the document that crane pushes: a manifest or an index.
    pub fn set_root(&self, media_type: MediaType, document: &[u8]) -> Result<()> {
        self.blob(document)?;
        let index = ImageIndexBuilder::default()
            .schema_version(SCHEMA_VERSION)
            .manifests([descriptor(media_type, document)?])
            .build()?;
        self.file("index.json", &json(&index)?)
    }

    /// Adds a blob under its digest.
    pub fn blob(&self, bytes: &[u8]) -> Result<()> {
        self.file(&blob_path(&digest(bytes)), bytes)
    }

    pub fn folder(&self) -> &Path {
        &self.0
    }

    fn file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.0.join(name);
        fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))
    }
}

/// Reads layouts in tests.
#[cfg(test)]
pub mod testing {
    use serde_json::Value;

    use super::{Layout, blob_path, fs};

    /// Returns the index, which names the document that crane pushes.
    pub fn index(layout: &Layout) -> Value {
        let bytes = fs::read(layout.folder().join("index.json")).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    /// Returns the blob of a digest.
    pub fn blob(layout: &Layout, digest: &Value) -> Vec<u8> {
        let path = blob_path(digest.as_str().unwrap());
        fs::read(layout.folder().join(path)).unwrap()
    }

    /// Returns the blob of a digest, which is JSON.
    pub fn document(layout: &Layout, digest: &Value) -> Value {
        serde_json::from_slice(&blob(layout, digest)).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        testing::{document, index},
        *,
    };
    use crate::images::testing::image;

    #[test]
    fn one_index_names_the_image_of_each_platform() {
        let folder = std::env::temp_dir().join(format!("thuban-layout-{}", std::process::id()));
        let archives: Vec<(Platform, PathBuf)> = [Platform::Amd64, Platform::Arm64]
            .map(|platform| {
                let archives = folder.join(platform.architecture());
                (platform, image().write_for(platform, &archives).unwrap())
            })
            .into();

        let layout = Layout::of(&archives, folder.join("both")).unwrap();
        let root = index(&layout);
        assert_eq!(root["manifests"].as_array().unwrap().len(), 1);
        let both = document(&layout, &root["manifests"][0]["digest"]);
        assert_eq!(both["mediaType"], "application/vnd.oci.image.index.v1+json");
        assert_eq!(both["manifests"].as_array().unwrap().len(), 2);
        for (place, architecture) in ["amd64", "arm64"].iter().enumerate() {
            let named = &both["manifests"][place];
            assert_eq!(named["platform"]["architecture"], *architecture);
            assert_eq!(named["platform"]["os"], "linux");
            let manifest = document(&layout, &named["digest"]);
            let config = document(&layout, &manifest["config"]["digest"]);
            assert_eq!(config["architecture"], *architecture);
        }

        let layout = Layout::of(&archives[1..], folder.join("one")).unwrap();
        let manifest = document(&layout, &index(&layout)["manifests"][0]["digest"]);
        assert_eq!(manifest["layers"].as_array().unwrap().len(), 1);

        let one = layout.folder().to_path_buf();
        drop(layout);
        assert!(!one.exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
