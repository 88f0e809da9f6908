// SPDX-License-Identifier: Apache-2.0
// Tensor files: what is written comes back, every kind of malformed file is refused by a sentence,
// and no damaged byte makes the reader crash. bf16 and the generator are tested here too.
#include "io/tensor_file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "uniep/bf16.hpp"

namespace uniep {
namespace {

namespace fs = std::filesystem;

class TensorFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "uniep-tensor-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = (folder_ / "a.safetensors").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write_bytes(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  [[nodiscard]] std::string read_bytes() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write_raw(const std::string& header, std::size_t data_bytes) const {
    std::string bytes(8, '\0');
    const std::uint64_t length = header.size();
    std::memcpy(bytes.data(), &length, 8);
    write_bytes(bytes + header + std::string(data_bytes, 'x'));
  }

  // Reading fails as the caller's mistake with a text that contains `part`.
  void expect_refused(const std::string& part) const {
    try {
      static_cast<void>(read_tensor_file(path_));
      ADD_FAILURE() << "accepted; expected a refusal with: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  void expect_header_refused(const std::string& header, std::size_t data_bytes,
                             const std::string& part) const {
    SCOPED_TRACE(header.substr(0, 200));
    write_raw(header, data_bytes);
    expect_refused(part);
  }
  [[nodiscard]] int num_files() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
  std::string path_;
};

TensorFile sample_file() {
  TensorFile file;
  file.metadata = {{"uniep_format", "1"}, {"note", "a \"quoted\" line\n"}};
  file.tensors["ids"] = make_tensor(DType::i32, {3}, std::vector<std::int32_t>{-1, 0, 7});
  file.tensors["wide"] = make_tensor(DType::i64, {1, 2}, std::vector<std::int64_t>{-5, 1LL << 40});
  file.tensors["half"] = make_tensor(DType::bf16, {1, 3}, std::vector<Bf16>{{1}, {2}, {3}});
  file.tensors["real"] = make_tensor(DType::f64, {1}, std::vector<double>{0.1});
  file.tensors["scalar"] = make_tensor(DType::f32, {}, std::vector<float>{2.5F});
  file.tensors["none"] = make_tensor(DType::f32, {4, 0}, std::vector<float>{});
  return file;
}

void expect_same(const TensorFile& a, const TensorFile& b) {
  EXPECT_EQ(a.metadata, b.metadata);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors) {
    ASSERT_TRUE(b.tensors.contains(name)) << name;
    const Tensor& other = b.tensors.at(name);
    EXPECT_EQ(tensor.dtype, other.dtype) << name;
    EXPECT_EQ(tensor.shape, other.shape) << name;
    EXPECT_EQ(tensor.data, other.data) << name;
  }
}

TEST_F(TensorFileTest, RoundTrip) {
  write_tensor_file(path_, sample_file());
  expect_same(sample_file(), read_tensor_file(path_));
  EXPECT_EQ(num_files(), 1);
  std::uint64_t length = 0;
  std::memcpy(&length, read_bytes().data(), 8);
  EXPECT_EQ(length % 8, 0U);
}

TEST_F(TensorFileTest, OverwritesAndFollowsLinks) {
  write_tensor_file(path_, sample_file());
  const fs::path link = folder_ / "link";
  fs::create_symlink(path_, link);
  write_tensor_file(link.string(), TensorFile{});
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_TRUE(read_tensor_file(path_).tensors.empty());
}

TEST_F(TensorFileTest, AcceptsWhatTheFormatAllows) {
  write_raw("{}   ", 0);
  EXPECT_TRUE(read_tensor_file(path_).tensors.empty());
  // Unaligned: an odd header length, and an f32 behind three bytes of nothing aligned.
  write_raw(R"({"b":{"data_offsets":[2,6],"shape":[1],"dtype":"F32"},)"
            R"("a":{"dtype":"BF16","shape":[1,1],"data_offsets":[0,2]}} )",
            6);
  EXPECT_EQ(read_tensor_file(path_).tensors.at("b").data.size(), 4U);
}

TEST_F(TensorFileTest, RefusesTheWrongKindOfFile) {
  expect_refused("cannot be opened");
  fs::create_directory(path_);
  expect_refused("is a directory");
  EXPECT_THROW(write_tensor_file(path_, TensorFile{}), Error);
  fs::remove(path_);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  expect_refused("not a regular file");
  EXPECT_THROW(write_tensor_file(path_, TensorFile{}), Error);
}

TEST_F(TensorFileTest, RefusesABadHeaderLength) {
  write_bytes("");
  expect_refused("0 bytes");
  write_bytes("1234567");
  expect_refused("length field");
  write_bytes(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10));
  expect_refused("at most 100000000");
  write_bytes(std::string("\3\0\0\0\0\0\0\0{}", 10));
  expect_refused("only 2 follow");
  write_bytes(std::string(8, '\0'));
  expect_refused("does not begin with '{'");
}

TEST_F(TensorFileTest, RefusesBadJson) {
  expect_header_refused("[]", 0, "does not begin with '{'");
  expect_header_refused(" {}", 0, "does not begin with '{'");
  expect_header_refused("{", 0, "not valid JSON");
  expect_header_refused("{} x", 0, "not valid JSON");
  expect_header_refused("{}{}", 0, "not valid JSON");
  expect_header_refused(std::string("{}\0{", 4), 0, "NUL");
  expect_header_refused("{\"\xff\":1}", 0, "not valid JSON");
  expect_header_refused(R"({"a":1})", 0, "an object belongs there");
  expect_header_refused(R"({"a":null})", 0, "null");
  expect_header_refused(R"({"a":[]})", 0, "a list");
  std::string deep = R"({"a":{"shape":)" + std::string(1'000'000, '[');
  expect_header_refused(deep, 0, "a list of whole numbers");
  deep.clear();
  for (int i = 0; i < 100'000; ++i) deep += R"({"a":)";
  expect_header_refused(deep, 0, "the field 'a'");
}

TEST_F(TensorFileTest, RefusesDuplicateKeys) {
  const std::string one = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  expect_header_refused(R"({"a":)" + one + R"(,"a":)" + one + "}", 4, "names 'a' twice");
  // The same name, once spelled with an escape.
  expect_header_refused(R"({"a":)" + one + R"(,"\u0061":)" + one + "}", 4, "names 'a' twice");
  expect_header_refused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                        4, "'dtype' twice");
  expect_header_refused(R"({"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", 4,
                        "'shape' twice");
  expect_header_refused(R"({"__metadata__":{"k":"1","k":"2"}})", 0, "'k' twice in __metadata__");
  expect_header_refused(R"({"__metadata__":{},"__metadata__":{}})", 0, "'__metadata__' twice");
}

TEST_F(TensorFileTest, RefusesBadFields) {
  expect_header_refused(R"({"a":{"dtype":"F32","shape":[1]}})", 4, "no data_offsets");
  expect_header_refused(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, "no dtype");
  expect_header_refused(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "no shape");
  expect_header_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4,
                        "field 'x'");
  expect_header_refused(R"({"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}})", 4,
                        "dtype 'F8_E4M3'");
  expect_header_refused(R"({"a":{"dtype":1}})", 0, "a number in the field dtype");
  expect_header_refused(R"({"a":{"dtype":["F32"]}})", 0, "a list in the field dtype");
  expect_header_refused(R"({"a":{"shape":4}})", 0, "a number in the field shape");
  expect_header_refused(R"({"a":{"shape":"4"}})", 0, "a string in the field shape");
  expect_header_refused(R"({"a":{"shape":[-1]}})", 0, "a negative number");
  expect_header_refused(R"({"a":{"shape":[1.5]}})", 0, "'1.5'");
  expect_header_refused(R"({"a":{"shape":[true]}})", 0, "a boolean");
  expect_header_refused(R"({"a":{"shape":[[1]]}})", 0, "a list");
  expect_header_refused(R"({"a":{"shape":[18446744073709551615]}})", 0, "does not fit 63 bits");
  expect_header_refused(R"({"a":{"shape":[184467440737095516160]}})", 0, "the number");
  expect_header_refused(R"({"__metadata__":{"k":1}})", 0, "only strings");
  expect_header_refused(R"({"__metadata__":{"k":{}}})", 0, "only strings");
  expect_header_refused(R"({"__metadata__":"x"})", 0, "an object belongs there");
}

std::string entry(const std::string& name, const std::string& shape, const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}";
}

TEST_F(TensorFileTest, RefusesBadExtents) {
  const std::string big = "4294967296";
  expect_header_refused("{" + entry("a", "[" + big + "," + big + "]", "[0,0]") + "}", 0, "63 bits");
  expect_header_refused("{" + entry("a", "[0," + big + "," + big + "]", "[0,0]") + "}", 0,
                        "63 bits");
  expect_header_refused("{" + entry("a", "[1]", "[0]") + "}", 4, "[begin, end]");
  expect_header_refused("{" + entry("a", "[1]", "[0,4,8]") + "}", 8, "[begin, end]");
  expect_header_refused("{" + entry("a", "[1]", "[4,0]") + "}", 4, "ascending");
  expect_header_refused("{" + entry("a", "[2]", "[0,4]") + "}", 4, "takes 8");
  expect_header_refused("{" + entry("a", "[1]", "[4,8]") + "}", 8, "gaps");
  expect_header_refused("{" + entry("a", "[1]", "[0,4]") + "," + entry("b", "[1]", "[8,12]") + "}",
                        12, "gaps");
  expect_header_refused("{" + entry("a", "[2]", "[0,8]") + "," + entry("b", "[1]", "[4,8]") + "}",
                        8, "overlaps");
  expect_header_refused("{" + entry("a", "[1]", "[0,4]") + "}", 3, "cut short");
  expect_header_refused("{" + entry("a", "[1]", "[0,4]") + "}", 5, "trailing bytes");
  expect_header_refused("{}", 1, "trailing bytes");
}

TEST_F(TensorFileTest, WriteRefusesWhatItCannotWrite) {
  TensorFile file = sample_file();
  try {
    write_tensor_file((folder_ / "missing" / "a").string(), file);
    ADD_FAILURE() << "wrote into a folder that does not exist";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  }
  EXPECT_THROW(write_tensor_file("", file), Error);
  EXPECT_THROW(write_tensor_file(folder_.string() + "/", file), Error);
  file.tensors["ids"].data.pop_back();
  EXPECT_THROW(write_tensor_file(path_, file), Error);
  file = sample_file();
  file.tensors["\xff"] = file.tensors["ids"];
  EXPECT_THROW(write_tensor_file(path_, file), Error);
  file = sample_file();
  file.tensors["__metadata__"] = file.tensors["ids"];
  EXPECT_THROW(write_tensor_file(path_, file), Error);
  EXPECT_EQ(num_files(), 0);
}

TEST_F(TensorFileTest, DamagedBytesNeverCrash) {
  write_tensor_file(path_, sample_file());
  const std::string good = read_bytes();
  Rng rng(1);
  int num_refused = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string bytes = good;
    for (std::uint64_t flips = 1 + rng.below(3); flips > 0; --flips) {
      bytes[rng.below(bytes.size())] = static_cast<char>(rng.below(256));
    }
    if (rng.below(8) == 0) bytes.resize(rng.below(bytes.size()));
    write_bytes(bytes);
    try {
      const TensorFile file = read_tensor_file(path_);
      for (const auto& [name, tensor] : file.tensors) {
        ASSERT_EQ(static_cast<std::int64_t>(tensor.data.size()),
                  tensor_bytes(tensor.dtype, tensor.shape));
      }
    } catch (const Error&) {
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 375);
}

TEST(Bf16, WidensAndNarrowsEveryValue) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const Bf16 value{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(value);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(to_float(to_bf16(wide)))) << bits;
      ASSERT_EQ(to_bf16(wide).bits, bits | 0x40U) << bits;
    } else {
      ASSERT_EQ(to_bf16(wide).bits, bits);
    }
  }
}

TEST(Bf16, RoundsToNearestTiesToEven) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7F80U) == 0x7F80U) continue;  // infinities and NaN
    const auto narrow = [bits](std::uint32_t low) {
      return std::uint32_t{to_bf16(std::bit_cast<float>(bits << 16 | low)).bits};
    };
    ASSERT_EQ(narrow(0x0001), bits);
    ASSERT_EQ(narrow(0x7FFF), bits);
    ASSERT_EQ(narrow(0x8000), bits + (bits & 1U)) << "a tie goes to even";
    ASSERT_EQ(narrow(0x8001), bits + 1);
    ASSERT_EQ(narrow(0xFFFF), bits + 1);
  }
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7F80U);
  // A NaN whose payload lies only in the bits that are cut.
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0xFF800001U)).bits, 0xFFC0U);
}

TEST(Rng, IsTheSameEverywhere) {
  Rng rng(42);
  Rng same(42);
  same.seek(5);
  for (int i = 0; i < 5; ++i) rng.next();
  EXPECT_EQ(rng.next(), same.next());
  EXPECT_NE(Rng(42, 1).next(), Rng(42, 0).next());
  EXPECT_NE(Rng(43).next(), Rng(42).next());
}

TEST(Rng, HasTheMomentsItClaims) {
  Rng rng(7);
  double sum = 0;
  double squares = 0;
  constexpr int kCount = 200'000;
  for (int i = 0; i < kCount; ++i) {
    const double value = static_cast<double>(rng.normal());
    sum += value;
    squares += value * value;
    const double uniform = rng.uniform01();
    ASSERT_TRUE(uniform >= 0 && uniform < 1);
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
  int counts[3] = {};
  for (int i = 0; i < 30'000; ++i) ++counts[rng.below(3)];
  for (const int count : counts) EXPECT_NEAR(count, 10'000, 500);
}

}  // namespace
}  // namespace uniep
