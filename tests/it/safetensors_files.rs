//! Reading and rewriting the safetensors files of checkpoints, for tests that change them.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Shape, bytes and type by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>, Dtype)>;

/// The tensors of all safetensors files in a directory.
pub fn read_all(dir: &Path) -> Tensors {
    let mut all = Tensors::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            all.extend(file.tensors().into_iter().map(|(n, t)| (n, (t.shape().to_vec(), t.data().to_vec(), t.dtype()))));
        }
    }
    assert!(!all.is_empty(), "{}: no tensors", dir.display());
    all
}

/// A temporary checkpoint of these.
pub fn write_checkpoint(config: &Value, tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(n, (shape, data, dtype))| (n.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}
