// SPDX-License-Identifier: Apache-2.0
// The safetensors reader and writer. The header is parsed with SAX events, not into a JSON value:
// only so are duplicate keys seen, and anything nested deeper than the format allows stops at once.
#include "io/tensor_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/error.hpp"
#include "base/memory.hpp"

namespace uniep {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor files hold little-endian values");

using Json = nlohmann::ordered_json;

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;
constexpr std::array kDTypes = {DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64};

std::string error_text(int error) { return std::generic_category().message(error); }

// One tensor as the header declares it; offsets count from the end of the header.
struct Entry {
  std::optional<DType> dtype;
  std::optional<std::vector<std::int64_t>> shape;
  std::optional<std::vector<std::int64_t>> data_offsets;
};

struct Header {
  std::map<std::string, Entry> entries;
  std::map<std::string, std::string> metadata;
};

class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string& path, Header& header) : path_(path), header_(header) {}

  bool key(string_t& name) override {
    if (place_ == Place::top) {
      name_ = name;
      const bool is_new =
          name == "__metadata__" ? !has_metadata_ : header_.entries.try_emplace(name).second;
      if (!is_new) refuse("names {} twice", quote(name));
      has_metadata_ = has_metadata_ || name == "__metadata__";
      return true;
    }
    if (place_ == Place::metadata) {
      if (!header_.metadata.try_emplace(name).second) {
        refuse("names {} twice in __metadata__", quote(name));
      }
    } else if (name != "dtype" && name != "shape" && name != "data_offsets") {
      refuse("gives tensor {} the field {}, but only dtype, shape and data_offsets exist",
             quote(name_), quote(name));
    } else if (has_field(name)) {
      refuse("gives tensor {} the field {} twice", quote(name_), quote(name));
    }
    field_ = name;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = name_ == "__metadata__" ? Place::metadata : Place::entry;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::entry) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!has_field(field)) refuse("gives tensor {} no {}", quote(name_), field);
      }
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::entry || field_ == "dtype") unexpected("a list");
    place_ = Place::list;
    list().emplace();
    return true;
  }

  bool end_array() override {
    place_ = Place::entry;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::list) unexpected("a number");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      refuse("gives tensor {} the {} value {}, which does not fit 63 bits", quote(name_), field_,
             value);
    }
    list()->push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      header_.metadata[field_] = value;
      return true;
    }
    if (place_ != Place::entry || field_ != "dtype") unexpected("a string");
    for (const DType dtype : kDTypes) {
      if (value == dtype_name(dtype)) header_.entries[name_].dtype = dtype;
    }
    if (!header_.entries[name_].dtype) {
      refuse(
          "gives tensor {} the dtype {}, which uniep does not read; it reads BF16, F32, F64, "
          "I32 and I64",
          quote(name_), quote(value));
    }
    return true;
  }

  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override {
    return unexpected(fmt::format("the number {}", quote(text)));
  }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    refuse("is not valid JSON at byte {}", position);
  }

 private:
  enum class Place { outside, top, entry, list, metadata };

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    throw_invalid("the header of tensor file {} {}", quote(path_),
                  fmt::format(format, std::forward<Args>(args)...));
  }

  [[noreturn]] bool unexpected(std::string_view found) const {
    switch (place_) {
      case Place::outside:
        refuse("holds {} where one JSON object belongs", found);
      case Place::top:
        refuse("gives {} the value {}, but an object belongs there", quote(name_), found);
      case Place::metadata:
        refuse("gives {} in __metadata__ the value {}, but only strings belong there",
               quote(field_), found);
      case Place::entry:
      case Place::list:
        break;
    }
    refuse("has {} in the field {} of tensor {}, where {} belongs", found, field_, quote(name_),
           field_ == "dtype" ? "a string" : "a list of whole numbers from 0");
  }

  bool has_field(std::string_view field) const {
    const Entry& entry = header_.entries.at(name_);
    if (field == "dtype") return entry.dtype.has_value();
    return field == "shape" ? entry.shape.has_value() : entry.data_offsets.has_value();
  }

  std::optional<std::vector<std::int64_t>>& list() {
    Entry& entry = header_.entries.at(name_);
    return field_ == "shape" ? entry.shape : entry.data_offsets;
  }

  const std::string& path_;
  Header& header_;
  Place place_ = Place::outside;
  bool has_metadata_ = false;
  std::string name_;   // the tensor being read
  std::string field_;  // its field, or the metadata key
};

class InputFile {
 public:
  explicit InputFile(const std::string& path) : path_(path) {
    // Without O_NONBLOCK a FIFO that nobody writes would hold us here for ever.
    fd_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd_ < 0)
      throw_invalid("tensor file {} cannot be opened: {}", quote(path), error_text(errno));
    struct stat info = {};
    const int failed = ::fstat(fd_, &info);
    if (failed != 0 || !S_ISREG(info.st_mode)) {
      ::close(fd_);
      throw_invalid("tensor file {} is {}; a regular file is needed", quote(path),
                    S_ISDIR(info.st_mode) ? "a directory" : "not a regular file");
    }
    num_bytes_ = info.st_size;
  }
  ~InputFile() { ::close(fd_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  [[nodiscard]] std::int64_t num_bytes() const { return num_bytes_; }

  void read(std::int64_t offset, std::span<std::byte> out) const {
    while (!out.empty()) {
      const ssize_t count = ::pread(fd_, out.data(), out.size(), offset);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0)
        throw_world("tensor file {} cannot be read: {}", quote(path_), error_text(errno));
      if (count == 0) throw_world("tensor file {} shrank while it was being read", quote(path_));
      offset += count;
      out = out.subspan(static_cast<std::size_t>(count));
    }
  }

 private:
  const std::string& path_;
  int fd_ = -1;
  std::int64_t num_bytes_ = 0;
};

std::string read_header_text(const InputFile& file, const std::string& path) {
  if (file.num_bytes() < kLengthBytes) {
    throw_invalid("tensor file {} has {} bytes; even its length field takes {}", quote(path),
                  file.num_bytes(), kLengthBytes);
  }
  std::uint64_t length = 0;
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > static_cast<std::uint64_t>(kMaxHeaderBytes)) {
    throw_invalid("tensor file {} declares a header of {} bytes; at most {} are allowed",
                  quote(path), length, kMaxHeaderBytes);
  }
  if (length > static_cast<std::uint64_t>(file.num_bytes() - kLengthBytes)) {
    throw_invalid(
        "tensor file {} declares a header of {} bytes, but only {} follow; it is cut short",
        quote(path), length, file.num_bytes() - kLengthBytes);
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(text)));
  return text;
}

Header parse_header(const std::string& path, const std::string& text) {
  if (text.empty() || text.front() != '{') {
    throw_invalid("the header of tensor file {} does not begin with '{{'", quote(path));
  }
  // The JSON library takes a NUL for the end of its input and would ignore what follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string::npos) {
    throw_invalid("the header of tensor file {} has a NUL at byte {}", quote(path), nul);
  }
  Header header;
  HeaderReader reader(path, header);
  nlohmann::json::sax_parse(text, &reader);
  return header;
}

// Offsets match dtype and shape, and the tensors tile the `data_bytes` behind the header exactly.
void check_offsets(const std::string& path, const Header& header, std::int64_t data_bytes) {
  std::vector<std::pair<std::array<std::int64_t, 2>, std::string_view>> extents;
  for (const auto& [name, entry] : header.entries) {
    const auto bytes = tensor_bytes(*entry.dtype, *entry.shape);
    if (!bytes) {
      throw_invalid("tensor {} of file {} has the shape {}, whose size does not fit 63 bits",
                    quote(name), quote(path), shape_text(*entry.shape));
    }
    const auto& offsets = *entry.data_offsets;
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      throw_invalid(
          "tensor {} of file {} has data_offsets {}; they must be [begin, end], ascending",
          quote(name), quote(path), shape_text(offsets));
    }
    if (offsets[1] - offsets[0] != *bytes) {
      throw_invalid(
          "tensor {} of file {} has data_offsets {}, {} bytes, but {} of shape {} takes {}",
          quote(name), quote(path), shape_text(offsets), offsets[1] - offsets[0],
          dtype_name(*entry.dtype), shape_text(*entry.shape), *bytes);
    }
    extents.push_back({{offsets[0], offsets[1]}, name});
  }
  std::sort(extents.begin(), extents.end());
  std::int64_t end = 0;
  for (const auto& [extent, name] : extents) {
    if (extent[0] != end) {
      throw_invalid(
          "tensor {} of file {} begins at byte {} of the data, but the one before it ends "
          "at {}; {} are not allowed",
          quote(name), quote(path), extent[0], end, extent[0] < end ? "overlaps" : "gaps");
    }
    end = extent[1];
  }
  if (end != data_bytes) {
    throw_invalid("tensor file {} holds {} bytes of data, but its tensors take {}; {}", quote(path),
                  data_bytes, end,
                  data_bytes < end ? "it is cut short" : "trailing bytes are not allowed");
  }
}

using NamedTensor = std::pair<const std::string, Tensor>;

// Wide types first, so that every tensor is aligned to its own element.
std::vector<const NamedTensor*> file_order(const TensorFile& file) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& item : file.tensors) order.push_back(&item);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return dtype_bytes(a->second.dtype) > dtype_bytes(b->second.dtype);
  });
  return order;
}

std::string header_text(const std::string& path, const TensorFile& file,
                        std::span<const NamedTensor* const> order) {
  Json header = Json::object();
  if (!file.metadata.empty()) header["__metadata__"] = file.metadata;
  std::int64_t offset = 0;
  for (const NamedTensor* item : order) {
    const auto& [name, tensor] = *item;
    const auto bytes = tensor_bytes(tensor.dtype, tensor.shape);
    if (name == "__metadata__") throw_invalid("a tensor cannot be named '__metadata__'");
    if (!bytes || static_cast<std::uint64_t>(*bytes) != tensor.data.size()) {
      throw_invalid("tensor {} of shape {} and dtype {} holds {} bytes, which do not fit",
                    quote(name), shape_text(tensor.shape), dtype_name(tensor.dtype),
                    tensor.data.size());
    }
    header[name] = {{"dtype", dtype_name(tensor.dtype)},
                    {"shape", tensor.shape},
                    {"data_offsets", {offset, offset + *bytes}}};
    offset += *bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    throw_invalid("tensor file {} cannot be written: a name or metadata value is not UTF-8",
                  quote(path));
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > static_cast<std::size_t>(kMaxHeaderBytes)) {
    throw_invalid("tensor file {} would need a header of {} bytes; at most {} are allowed",
                  quote(path), text.size(), kMaxHeaderBytes);
  }
  return text;
}

}  // namespace

std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 2;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
    case DType::i64:
      return 8;
  }
  UNIEP_ASSERT(false && "a DType outside its enumerators");
  return 0;
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "BF16";
    case DType::f32:
      return "F32";
    case DType::f64:
      return "F64";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
  }
  UNIEP_ASSERT(false && "a DType outside its enumerators");
  return "";
}

std::optional<std::int64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape) {
  std::int64_t bytes = dtype_bytes(dtype);
  bool is_empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return is_empty ? 0 : bytes;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  constexpr std::size_t kMaxShown = 8;
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size() && i < kMaxShown; ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  }
  return text + (shape.size() > kMaxShown ? ", …]" : "]");
}

std::string quote(std::string_view text) {
  constexpr std::size_t kMaxShown = 200;
  std::string out = "'";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (text.size() > kMaxShown ? "…'" : "'");
}

TensorFile read_tensor_file(const std::string& path) {
  try {
    const InputFile input(path);
    require_memory(static_cast<double>(input.num_bytes()), "tensor file " + quote(path));
    const std::string text = read_header_text(input, path);
    Header header = parse_header(path, text);
    const std::int64_t data_start = kLengthBytes + static_cast<std::int64_t>(text.size());
    check_offsets(path, header, input.num_bytes() - data_start);

    TensorFile file;
    file.metadata = std::move(header.metadata);
    for (auto& [name, entry] : header.entries) {
      const auto& offsets = *entry.data_offsets;
      Tensor& tensor = file.tensors[name];
      tensor.dtype = *entry.dtype;
      tensor.shape = std::move(*entry.shape);
      tensor.data.resize(static_cast<std::size_t>(offsets[1] - offsets[0]));
      input.read(data_start + offsets[0], tensor.data);
    }
    return file;
  } catch (const std::bad_alloc&) {
    throw_world("tensor file {} does not fit the memory of this machine", quote(path));
  }
}

void write_tensor_file(OutputFile& output, const std::string& path, const TensorFile& file) {
  const auto order = file_order(file);
  const std::string text = header_text(path, file, order);
  const auto length = static_cast<std::uint64_t>(text.size());
  output.write(std::as_bytes(std::span(&length, 1)));
  output.write(std::as_bytes(std::span(text)));
  for (const NamedTensor* item : order) output.write(item->second.data);
}

void write_tensor_file(const std::string& path, const TensorFile& file) {
  OutputFile output("tensor file", path);
  write_tensor_file(output, path, file);
  output.publish();
}

}  // namespace uniep
